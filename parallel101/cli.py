"""The command line, `parallel101 doctor`, `parallel101 lab` and others: `parallel101 --help`.

A command imports what it needs only when it runs, so that `doctor` still works where torch or
Jupyter is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from parallel101 import __version__
from parallel101.extras import MissingExtra, needs_extra
from parallel101.laboratory.run_command import add_run_commands, option, seconds_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit status.

    It is 0 for success and 1 for failure. Wrong arguments exit with status 2.
    """
    _escape_unsupported_characters()
    try:
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:
                # here, so that a write error is handled below and not while Python exits
                sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe (`| head`), which is not an error
        _discard_further_output()
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _discard_further_output()
        print(
            f"parallel101: cannot write {error.filename or 'the output'}: {error.strerror}",
            file=sys.stderr,
        )
        return 1


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args, extra = parser.parse_known_args(argv)
    if args.command is None:
        if extra:
            parser.error(f"unrecognized arguments: {' '.join(extra)}")
        print(_greeting(parser))
        return 0
    if extra and not args.takes_extra:
        args.parser.error(f"unrecognized arguments: {' '.join(extra)}")
    try:
        with needs_extra(f"parallel101 {args.command}"):
            return args.run(args, extra)
    except MissingExtra as error:
        print(error, file=sys.stderr)
        return 1
    except (FileNotFoundError, ValueError) as error:  # a wrong argument
        return args.parser.exit(2, f"parallel101 {args.command}: error: {error}\n")
    except KeyboardInterrupt:
        print(f"parallel101 {args.command}: stopped", file=sys.stderr)
        return 130


def _discard_further_output() -> None:
    """Redirect stdout to nowhere.

    Python flushes it once more when it exits, and would report the same error again.
    """
    # stdout may be an object without a file descriptor
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _escape_unsupported_characters() -> None:
    r"""Print an escape for a character that the output's encoding lacks.

    With LC_ALL=C it lacks ✓, for example.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not None, as in a daemon, and not a notebook's stream
            stream.reconfigure(errors="backslashreplace")


def _greeting(parser: argparse.ArgumentParser) -> str:
    """Return the help text: each command with an example and what it does."""
    (commands,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    lines = [f"parallel101 {__version__}. {parser.description}", ""]
    for sub in commands.choices.values():
        text = textwrap.wrap(str(sub.description).partition(". ")[0].removesuffix(".") + ".", 92)
        lines.append(f"  parallel101 {sub.get_default('example')}")
        lines += [f"      {line}" for line in text]
    return "\n".join([*lines, "", "All options of a command: parallel101 COMMAND --help"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="parallel101",
        description="Learn how neural networks are trained on many GPUs and machines.",
    )
    parser.add_argument("--version", action="version", version=f"parallel101 {__version__}")
    commands = parser.add_subparsers(dest="command")

    def command(example, run, text, takes_extra=False):
        name = example.partition(" ")[0]
        # bench has a --help of its own
        sub = commands.add_parser(name, help=text, description=text, add_help=name != "bench")
        sub.set_defaults(run=run, takes_extra=takes_extra, parser=sub, example=example)
        return sub

    doctor = command(
        "doctor", _doctor, "Check what works on this machine, and say how to fix what does not."
    )
    doctor.add_argument("--json", action="store_true", help="print the table as JSON, for programs")

    text = "Open the {} in JupyterLab. Other options go to JupyterLab (e.g. --no-browser)."
    lab = command("lab", _lab, text.format("lessons"), takes_extra=True)
    command("homework", _homework, text.format("homework"), takes_extra=True)
    lessons = command(
        "lessons 01",
        _lessons,
        "Run the lessons on real ranks and write them as web pages that work offline.",
    )
    for sub in (lab, lessons):
        text = "folder with the notebooks (default: the nearest lessons/, or those of the wheel)"
        option(sub, "--lessons", "FOLDER", text)
    text = "lessons to run, e.g. 01 or 01_collectives (default: all that have changed)"
    option(lessons, "names", "NAME", text, nargs="*")
    text = "build a course of these lessons alone, e.g. 01,04; the index lists no others"
    option(lessons, "--only", "NAMES", text)
    text = "build the course of this syllabus: title, weeks, dates, lessons, goals, homework"
    option(lessons, "--syllabus", "FILE", text, Path)
    text = "folder for the pages (default: site)"
    option(lessons, "--out", "FOLDER", text, Path, default=Path("site"))
    text = (
        "the repository on GitHub that has the lessons, which Colab can then open; @REF names "
        "a branch or tag other than main (default: GITHUB_REPOSITORY)"
    )
    option(lessons, "--repository", "OWNER/NAME", text)
    text = "time limit for each cell (default: 600)"
    option(lessons, "--timeout", "SECONDS", text, seconds_of, default=600.0)

    notebooks = command(
        "notebooks my_course",
        _notebooks,
        "Copy the lessons and the homework to a folder of your own, without a clone.",
    )
    text = "where lessons/ and homework/ are written (default: here)"
    option(notebooks, "folder", "FOLDER", text, Path, nargs="?", default=Path())

    add_run_commands(command)

    grade = command(
        "grade homework/hw1_moving",
        _grade,
        "Grade homework: one set with all verdicts, or a folder of sets with a table of points.",
    )
    text = "e.g. homework or homework/hw1_moving (default: homework/ here)"
    option(grade, "path", "PATH", text, Path, nargs="?")
    text = "what was handed in: a file, a folder, or a folder for each learner"
    option(grade, "--submission", "PATH", text, Path)
    text = "write results.json as Gradescope reads it, after each exercise"
    option(grade, "--gradescope", "FILE", text, Path)
    text = "write the result to this file; of a class, to a file each in this folder"
    option(grade, "--json", "PATH", text, Path)
    option(grade, "--csv", "FILE", "write a table: points, and why points are missing", Path)
    text = "write a web page for each learner: verdicts, and pictures of their own runs"
    option(grade, "--feedback", "DIR", text, Path)
    text = "a name in each line: who handed in nothing has a row, too"
    option(grade, "--class-list", "FILE", text, Path)
    text = "of a class, how many submissions are graded at a time (default: 1)"
    option(grade, "--jobs", "N", text, int, default=1)

    release = command(
        "release homework/hw1_moving --out bundles",
        _release,
        "Write what a teacher needs: the learners' bundle, and autograders with secret cases.",
    )
    option(release, "path", "PATH", "the homework set, e.g. homework/hw1_moving", Path)
    option(release, "--out", "DIR", "the folder for the bundles", Path, required=True)
    text = (
        "where autograders get parallel101, e.g. git+https://github.com/me/parallel101@v1 "
        "(default: a wheel in the bundle)"
    )
    option(release, "--library", "ADDRESS", text)
    for sub in (grade, release):
        option(sub, "--seed-file", "FILE", "a file with the teacher's secret seed", Path)

    from parallel101.laboratory.planner import plan_command

    text = "Lay out the training of a model on many GPUs, and predict how long a step takes."
    plan_command.add_arguments(command("plan --model llama-3-70b --gpus 1024", _plan, text))

    command(
        "bench collectives",
        _bench,
        "Measure parallel101 on this machine, and compare it with torch.",
        takes_extra=True,
    )
    commands.metavar = " | ".join(commands.choices)
    return parser


def _doctor(args: argparse.Namespace, extra: list[str]) -> int:
    from parallel101.laboratory import doctor

    return doctor.main(as_json=args.json)


def _lab(args: argparse.Namespace, extra: list[str]) -> int:
    from jupyterlab.labapp import LabApp

    from parallel101.laboratory.grade.homework import find_homework
    from parallel101.laboratory.publish.find import find_lessons, found_or_copied

    folder, options = (
        (find_homework, extra[1:])
        if extra[:1] == ["homework"]
        else (lambda: find_lessons(args.lessons, to_edit=True), extra)
    )
    shown = found_or_copied(folder) if args.lessons is None else folder()
    no_news = [
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    LabApp.launch_instance(argv=[str(shown), *no_news, *(o for o in options if o != "--")])
    return 0


def _homework(args: argparse.Namespace, extra: list[str]) -> int:
    return _lab(args, ["homework", *extra])


def _lessons(args: argparse.Namespace, extra: list[str]) -> int:
    _import_no_grammars()
    from parallel101.laboratory.publish.find import Repository, find_lessons, select_lessons
    from parallel101.laboratory.publish.syllabus import read_syllabus
    from parallel101.laboratory.publish.write_site import make_output_folder, publish

    syllabus, repository = None, Repository.of_environment(os.environ)
    folder = find_lessons(args.lessons)
    if args.repository is not None:
        repository = Repository.of(args.repository)
    names = [*args.names, *(args.only or "").replace(",", " ").split()]
    notebooks = select_lessons(folder, names)
    if args.syllabus is not None:
        if args.only is not None:
            raise ValueError("the syllabus names the lessons; leave out --only")
        syllabus = read_syllabus(args.syllabus, folder)
        other = [path.stem for path in notebooks if path.stem not in syllabus.lessons]
        if names and other:
            raise ValueError(f"{other[0]} is not in {args.syllabus}")
        notebooks = [path for path in notebooks if path.stem in syllabus.lessons]
        if not notebooks:
            raise ValueError(f"{args.syllabus} names no lesson")
    make_output_folder(args.out)
    print(
        f"Running {len(notebooks)} lesson{'s' * (len(notebooks) > 1)}: "
        f"{', '.join(n.stem for n in notebooks)}",
        flush=True,
    )
    done = publish(
        notebooks,
        args.out,
        only=args.only is not None,
        syllabus=syllabus,
        again=bool(args.names),
        repository=repository,
        timeout=args.timeout,
    )
    print(
        "Wrote",
        *(f"  {page}  {page.stat().st_size / 1000:,.0f} kB" for page in done.written),
        sep="\n",
    )
    for failure in done.failed:
        print(f"\n✗ {failure}", file=sys.stderr)
    if done.failed:
        return 1
    print(f"Open {done.written[-1]} in a browser. The pages work offline.")
    return 0


def _import_no_grammars() -> None:
    """Leave out a module for URLs, whose grammars take two seconds.

    nbformat imports it by way of jsonschema and never uses it. Call this before `publish` is used.
    """
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]


def _notebooks(args: argparse.Namespace, extra: list[str]) -> int:
    from parallel101.laboratory.publish.find import copy_notebooks

    lessons, homework = copy_notebooks(args.folder)
    print(f"Wrote {lessons} and {homework}")
    print("To open them: parallel101 lab, or parallel101 homework")
    return 0


def _grade(args: argparse.Namespace, extra: list[str]) -> int:
    from parallel101.laboratory.grade import command

    names = ("gradescope", "json", "csv", "feedback", "class_list", "seed_file")
    files = {name: getattr(args, name) for name in names}
    if args.submission is None and not any(files.values()):
        return command.main(args.path)
    if args.path is None:
        raise ValueError(
            "name the homework set, e.g. parallel101 grade homework/hw1_moving --submission "
            "submissions"
        )
    return command.handed_in(args.path, args.submission, jobs=max(1, args.jobs), **files)


def _release(args: argparse.Namespace, extra: list[str]) -> int:
    from parallel101.laboratory.grade import command

    return command.release_set(args.path, args.out, args.seed_file, args.library)


def _plan(args: argparse.Namespace, extra: list[str]) -> int:
    from parallel101.laboratory.planner import plan_command

    return plan_command.main(args)


def _bench(args: argparse.Namespace, extra: list[str]) -> int:
    from parallel101.laboratory.bench import main as bench

    return bench(extra)


if __name__ == "__main__":
    sys.exit(main())
