#!/usr/bin/env bash
# Gradescope runs this for each submission, as root. Results are written after each exercise, so a
# time limit costs only the exercises that are left.
set -u
base=${AUTOGRADER:-/autograder}
source=$base/source results=$base/results submission=$base/submission
mkdir -p "$results"
chmod 700 "$source" "$results"
exec "${GRADER:-/opt/grader/bin/parallel101}" grade "$source/{name}" --submission "$submission" \
  --gradescope "$results/results.json" --seed-file "$source/seed.txt"
