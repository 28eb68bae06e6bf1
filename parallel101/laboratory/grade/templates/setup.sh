#!/usr/bin/env bash
# Gradescope runs this once, as root, when it builds the image. Everything is in /opt/grader, where
# any user can read Python and torch: when a submission is graded, each rank becomes a user of its
# own.
set -eu
apt-get update -qq
apt-get install -y -qq python3 python3-venv python3-pip
python3 -m venv /opt/grader
CPU=https://download.pytorch.org/whl/cpu
/opt/grader/bin/pip install --quiet --extra-index-url $CPU "torch=={torch}"
/opt/grader/bin/pip install --quiet "{library}"
chmod 700 /autograder/source
