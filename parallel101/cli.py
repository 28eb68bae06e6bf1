"""The command line, `parallel101 doctor`, `parallel101 lab` and others: `parallel101 --help`.

A command is a function. Its signature says which arguments it takes, of which types, and its
docstring says what they mean:

    def release(path: Path, *, out: Path)         parallel101 release PATH --out OUT
    *, json: bool = False                         --json
    *names: str                                   any number of names

A command imports what it needs only when it runs, so that `doctor` still works where torch or
Jupyter is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import inspect
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from parallel101 import __version__
from parallel101.extras import MissingExtra, needs_extra
from parallel101.laboratory.bench import bench
from parallel101.laboratory.option_types import Seconds, Whole, reader
from parallel101.laboratory.planner.plan_command import plan
from parallel101.laboratory.run_command import merge, run

# by type, the word for an option's value in the help; other types have it beside their function
VALUES: dict[Any, list[str]] = {int: ["N"], Path: ["PATH"]}
# how many arguments a `*name` takes; `*options` takes those that argparse doesn't know
VARIADIC = {"names": "*", "arguments": argparse.REMAINDER}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit status.

    It is 0 for success and 1 for failure. Wrong arguments exit with status 2.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not None, as in a daemon, and not a notebook's stream
            # print an escape for what the encoding lacks: with LC_ALL=C it lacks ✓
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:
                # here, so that a write error is handled below and not while Python exits
                sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            raise
        # Python flushes stdout once more when it exits, and would report the same error again;
        # stdout may be an object without a file descriptor
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # the reader has closed the pipe (`| head`): not an error
            return 141
        what = f"cannot write {error.filename or 'the output'}: {error.strerror}"
        print(f"parallel101: {what}", file=sys.stderr)
        return 1


def _run(argv: Sequence[str] | None) -> int:
    args, call = _parsed(argv)
    try:
        with needs_extra(f"parallel101 {args.command}"):
            return args.function(*call.args, **call.kwargs)
    except MissingExtra as error:
        print(error, file=sys.stderr)
        return 1
    except (FileNotFoundError, ValueError) as error:  # a wrong argument
        return args.parser.exit(2, f"parallel101 {args.command}: error: {error}\n")
    except KeyboardInterrupt:
        print(f"parallel101 {args.command}: stopped", file=sys.stderr)
        return 130


def _parsed(argv: Sequence[str] | None) -> tuple[argparse.Namespace, inspect.BoundArguments]:
    """Return what argparse reads, with the command as `function`, and the command's arguments."""
    about = "Learn how neural networks are trained on many GPUs and machines."
    parser = argparse.ArgumentParser(prog="parallel101", description=about)
    parser.add_argument("--version", action="version", version=f"parallel101 {__version__}")
    commands = parser.add_subparsers(dest="command")
    greeting = [f"parallel101 {__version__}. {about}", ""]
    for example, command in COMMANDS.items():
        name, (text, *_) = example.split()[0], (inspect.getdoc(command) or "").split("\n\n")
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(parser=sub, function=command)
        _add_arguments(sub, command)
        greeting.append(f"  parallel101 {example}")
        greeting.append(f"      {text.partition('. ')[0].removesuffix('.')}.")
    greeting += ["", "All options of a command: parallel101 COMMAND --help"]
    commands.metavar = " | ".join(commands.choices)
    parser.set_defaults(parser=parser, function=lambda: print("\n".join(greeting)) or 0)
    args, extra = parser.parse_known_args(argv)
    signature = inspect.signature(args.function)
    if extra and "options" not in signature.parameters:
        args.parser.error(f"unrecognized arguments: {' '.join(extra)}")
    given = OrderedDict((name, vars(args).get(name, extra)) for name in signature.parameters)
    return args, inspect.BoundArguments(signature, given)


def _add_arguments(parser: argparse.ArgumentParser, command: Callable[..., int]) -> None:
    """Give a parser the arguments of a function, except `*options`."""
    texts = dict(
        re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", (inspect.getdoc(command) or ""), re.M)
    )
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        default, kind = parameter.default, parameter.annotation
        kind = get_args(kind)[0] if type(None) in get_args(kind) else kind
        convert, *value = getattr(kind, "__metadata__", (kind, *VALUES.get(kind, ())))
        text, required = " ".join(texts.get(name, "").split()), default is parameter.empty
        if not required and default and default != float("inf"):
            text += f" (default: {default})"
        options: dict[str, Any] = {
            "help": text.replace("%", "%%"),
            "default": None if required else default,
        }
        if kind is bool:
            options["action"] = "store_true"
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        else:
            options["type"] = reader(convert)
        if parameter.kind is not parameter.KEYWORD_ONLY and name != "options":
            nargs = VARIADIC.get(name, None if required else "?")
            parser.add_argument(name, nargs=nargs, **options)
        elif parameter.kind is parameter.KEYWORD_ONLY:
            options |= {"metavar": value[0]} if value else {}
            flag = f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"
            parser.add_argument(flag, required=required, **options)


# ── The commands


def doctor(*, json: bool = False) -> int:
    """Check what works on this machine, and say how to fix what does not.

    Args:
        json: print the table as JSON, for programs
    """
    from parallel101.laboratory import doctor

    return doctor.main(as_json=json)


def lab(*options: str, lessons: str | None = None) -> int:
    """Open the lessons in JupyterLab. Other options go to JupyterLab (e.g. --no-browser).

    Args:
        options: of JupyterLab
        lessons: folder with the notebooks (default: the nearest lessons/, or those of the wheel)
    """
    from parallel101.laboratory.publish.find import find_lessons

    return _jupyter(options, lambda: find_lessons(lessons, to_edit=True), lessons is None)


def homework(*options: str) -> int:
    """Open the homework in JupyterLab. Other options go to JupyterLab (e.g. --no-browser).

    Args:
        options: of JupyterLab
    """
    from parallel101.laboratory.grade.homework import find_homework

    return _jupyter(options, find_homework)


def _jupyter(options: Sequence[str], folder: Callable[[], Path], copied: bool = True) -> int:
    from jupyterlab.labapp import LabApp

    from parallel101.laboratory.publish.find import found_or_copied

    shown = found_or_copied(folder) if copied else folder()
    # without the extension that asks about news and checks for updates
    quiet = str(Path(__file__).parent / "laboratory/publish/jupyter_config")
    others = os.environ.get("JUPYTER_CONFIG_PATH", "").split(os.pathsep)
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join([quiet, *filter(None, others)])
    LabApp.launch_instance(argv=[str(shown), *(o for o in options if o != "--")])
    return 0


def lessons(
    *names: str,
    lessons: str | None = None,
    only: str | None = None,
    syllabus: Path | None = None,
    out: Path = Path("site"),
    repository: str | None = None,
    timeout: Seconds = 600.0,
) -> int:
    """Run the lessons on real ranks and write them as web pages that work offline.

    Args:
        names: lessons to run, e.g. 01 or 01_collectives (default: all that have changed)
        lessons: folder with the notebooks (default: the nearest lessons/, or those of the wheel)
        only: build a course of these lessons alone, e.g. 01,04; the index lists no others
        syllabus: build the course of this file: title, weeks, dates, lessons, goals, homework
        out: folder for the pages
        repository: OWNER/NAME, the repository on GitHub that has the lessons, which Colab can then
            open; @REF names a branch or tag other than main (default: GITHUB_REPOSITORY)
        timeout: the time limit for each cell
    """
    # nbformat imports a module for URLs by way of jsonschema and never uses it; its grammars take
    # two seconds
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    from parallel101.laboratory.publish.find import Repository, find_lessons, select_lessons
    from parallel101.laboratory.publish.syllabus import read_syllabus
    from parallel101.laboratory.publish.write_site import make_output_folder, publish

    folder = find_lessons(lessons)
    at = Repository.of_environment(os.environ) if repository is None else Repository.of(repository)
    chosen = [*names, *(only or "").replace(",", " ").split()]
    notebooks, course = select_lessons(folder, chosen), None
    if syllabus is not None:
        if only is not None:
            raise ValueError("the syllabus names the lessons; leave out --only")
        course = read_syllabus(syllabus, folder)
        other = [path.stem for path in notebooks if path.stem not in course.lessons]
        if chosen and other:
            raise ValueError(f"{other[0]} is not in {syllabus}")
        notebooks = [path for path in notebooks if path.stem in course.lessons]
        if not notebooks:
            raise ValueError(f"{syllabus} names no lesson")
    make_output_folder(out)
    stems = ", ".join(path.stem for path in notebooks)
    print(f"Running {len(notebooks)} lesson{'s' * (len(notebooks) > 1)}: {stems}", flush=True)
    options: dict[str, Any] = {"syllabus": course, "repository": at, "timeout": timeout}
    done = publish(notebooks, out, only=only is not None, again=bool(names), **options)
    print("Wrote")
    for page in done.written:
        print(f"  {page}  {page.stat().st_size / 1000:,.0f} kB")
    for failure in done.failed:
        print(f"\n✗ {failure}", file=sys.stderr)
    if done.failed:
        return 1
    print(f"Open {done.written[-1]} in a browser. The pages work offline.")
    return 0


def notebooks(folder: Path = Path()) -> int:
    """Copy the lessons and the homework to a folder of your own, without a clone.

    Args:
        folder: where lessons/ and homework/ are written
    """
    from parallel101.laboratory.publish.find import copy_notebooks

    print("Wrote {} and {}".format(*copy_notebooks(folder)))
    print("To open them: parallel101 lab, or parallel101 homework")
    return 0


def grade(
    path: Path | None = None,
    *,
    submission: Path | None = None,
    gradescope: Path | None = None,
    json: Path | None = None,
    csv: Path | None = None,
    feedback: Path | None = None,
    class_list: Path | None = None,
    seed_file: Path | None = None,
    jobs: Whole = 1,
) -> int:
    """Grade homework: one set with all verdicts, or a folder of sets with a table of points.

    Args:
        path: e.g. homework or homework/hw1_moving (default: homework/ here)
        submission: what was handed in: a file, a folder, or a folder for each learner
        gradescope: write results.json as Gradescope reads it, after each exercise
        json: write the result to this file; of a class, to a file each in this folder
        csv: write a table: points, and why points are missing
        feedback: write a web page for each learner: verdicts, and pictures of their own runs
        class_list: a name in each line: who handed in nothing has a row, too
        seed_file: a file with the teacher's secret seed
        jobs: of a class, how many submissions are graded at a time
    """
    from parallel101.laboratory.grade import command

    files = {"gradescope": gradescope, "json": json, "csv": csv, "feedback": feedback}
    files |= {"class_list": class_list, "seed_file": seed_file}
    if submission is None and not any(files.values()):
        return command.main(path)
    if path is None:
        raise ValueError(
            "name the homework set, e.g. parallel101 grade homework/hw1_moving --submission "
            "submissions"
        )
    return command.handed_in(path, submission, jobs=jobs, **files)


def release(
    path: Path, *, out: Path, library: str | None = None, seed_file: Path | None = None
) -> int:
    """Write what a teacher needs: the learners' bundle, and autograders with secret cases.

    Args:
        path: the homework set, e.g. homework/hw1_moving
        out: the folder for the bundles
        library: where autograders get parallel101, e.g. git+https://github.com/me/parallel101@v1
            (default: a wheel in the bundle)
        seed_file: a file with the teacher's secret seed
    """
    from parallel101.laboratory.grade import command

    return command.release_set(path, out, seed_file, library)


# an example of each command, which its help shows → the function
COMMANDS: dict[str, Callable[..., int]] = {
    "doctor": doctor,
    "lab": lab,
    "homework": homework,
    "lessons 01": lessons,
    "notebooks my_course": notebooks,
    "run --world-size 4 train.py": run,
    "merge trace --page trace.html": merge,
    "grade homework/hw1_moving": grade,
    "release homework/hw1_moving --out bundles": release,
    "plan --model llama-3-70b --gpus 1024": plan,
    "bench collectives": bench,
}


if __name__ == "__main__":
    sys.exit(main())
