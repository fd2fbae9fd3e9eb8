"""Lists studies, runs one, shows its tables."""

import argparse
import ast
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jdelta
from benchmarks.study import FOLDERS, Study, load, studies


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command_line = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = command_line.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the studies, and what they ask")
    run = commands.add_parser("run", help="make the rows of a study that are not there yet")
    table = commands.add_parser("table", help="print the tables of a study; run nothing")
    named = [command.add_subparsers(dest="name", required=True) for command in (run, table)]
    for study in studies().values():
        question = study.question.replace("%", "%%")  # argparse formats it
        of_run, of_table = (names.add_parser(study.name, help=question) for names in named)
        for one in (of_run, of_table):
            one.description = f"{study.question}\n\n{inspect.getmodule(study.jobs).__doc__}"
            one.formatter_class = argparse.RawDescriptionHelpFormatter
        add_options(of_run, study)
        of_table.add_argument(
            "--json", type=Path, action="append", help="a file of rows; default: all in results"
        )
    return command_line


def add_options(parser: argparse.ArgumentParser, study: Study) -> None:
    """The options of a run: one for each parameter of the study's jobs, and settings."""
    for parameter in inspect.signature(study.jobs).parameters.values():
        choices = tuple(parameter.default)
        parser.add_argument(
            f"--{parameter.name}",
            action="append",
            type=str if choices[0] is None else type(choices[0]),
            metavar="CHOICE",
            help="default: " + ", ".join(map(str, choices)).replace("%", "%%"),
        )
    names = " ".join(sorted(settings_of(study)))
    parser.add_argument(
        "--with",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"a setting of this run: {names or 'there is none'}",
    )
    parser.add_argument("--json", type=Path, help=f"file of the rows; default: {study.file.name}")


def settings_of(study: Study) -> set[str]:
    """Names of what `measure` takes beside what its jobs give it."""
    keys = {name for job in study.jobs() for name in job.key}
    parameters = inspect.signature(study.measure).parameters.values()
    return {p.name for p in parameters if p.default is not p.empty} - keys


def value(text: str) -> Any:
    """A setting: a number where it is written as one."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def run(study: Study, options: argparse.Namespace) -> str:
    """Runs what a file lacks of the chosen jobs; all tables of the file."""
    names = inspect.signature(study.jobs).parameters
    chosen = {name: getattr(options, name) for name in names if getattr(options, name)}
    settings = dict(one.split("=", 1) for one in options.settings)
    jobs = study.jobs(**chosen)
    values = {name: value(text) for name, text in settings.items()}
    return study.tables(study.run(jobs, options.json or study.file, **values))


def listed() -> str:
    """The studies, folder by folder."""
    lines: list[str] = []
    all_studies = studies().values()
    for folder in FOLDERS:
        inside = [s for s in all_studies if f".{folder}." in inspect.getmodule(s.jobs).__name__]
        lines += [folder, *(f"  {study.name:15} {study.question}" for study in inside)]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    command_line = parser()
    options = command_line.parse_args(arguments)
    if options.command == "list":
        print(listed())
        return
    study = studies()[options.name]
    if options.command == "table":
        files = options.json
        print(study.tables([r for path in files for r in load(path)] if files else study.rows()))
        return
    unknown = {one.partition("=")[0] for one in options.settings} - settings_of(study)
    if unknown:
        command_line.error(f"{study.name} has no setting {', '.join(sorted(unknown))}")
    try:
        print(run(study, options))
    except jdelta.TargetError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
