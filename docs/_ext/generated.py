"""What pages of the reference show that is written elsewhere: the form of plan files, and help."""

import contextlib
import io
import json
import os
from pathlib import Path
from unittest import mock

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import jdelta
from jdelta._src.cli import main

SCHEMA = Path(jdelta.__file__).parent / "_src" / "plan" / "plan.schema.json"
HEAD = ("field", "type", "what it is")


def rows(properties, prefix=""):
    """A row for each property of an object, and for those of objects in it."""
    for name, said in properties.items():
        path = f"{prefix}{name}"
        yield path, kind(said), said.get("description", "")
        inner = said.get("items", said) if kind(said) == "list of objects" else said
        yield from rows(inner.get("properties", {}), f"{path}.")


def kind(said):
    """The type of a property in a few words."""
    if "$ref" in said:
        return said["$ref"].rpartition("/")[2]
    if "oneOf" in said:
        return " or ".join(map(kind, said["oneOf"]))
    if "enum" in said:
        return "one of " + ", ".join(map(str, said["enum"]))
    if "const" in said:
        return str(said["const"])
    named = said.get("type", "any")
    named = named if isinstance(named, str) else " or ".join(named)
    if named == "array":
        inner = said.get("items")
        return f"list of {kind(inner)}" if inner else "pair"
    return named


def table(head, body):
    """A docutils table."""
    group = nodes.tgroup(cols=len(head))
    group += [nodes.colspec(colwidth=1) for _ in head]
    for part, lines in ((nodes.thead, [head]), (nodes.tbody, body)):
        block = part()
        for line in lines:
            row = nodes.row()
            for place, text in enumerate(line):
                is_code = part is nodes.tbody and place == 0
                inner = nodes.literal(text, text) if is_code else nodes.Text(text)
                row += nodes.entry("", nodes.paragraph("", "", inner))
            block += row
        group += block
    return nodes.table("", group)


class PlanSchema(SphinxDirective):
    """``{plan-schema} question``: a part of a plan's file, or one of its ``$defs``."""

    required_arguments = 1

    def run(self):
        """The table of its fields."""
        self.env.note_dependency(str(SCHEMA))
        schema = json.loads(SCHEMA.read_text("utf-8"))
        name = self.arguments[0]
        said = schema["properties"].get(name) or schema["$defs"][name]
        return [table(HEAD, list(rows(said["properties"])))]


class CommandHelp(SphinxDirective):
    """``{command-help} plan``: what ``jdelta plan --help`` prints; without an argument, all."""

    optional_arguments = 1

    def run(self):
        """The text as it is printed."""
        printed = io.StringIO()
        width = mock.patch.dict(os.environ, {"COLUMNS": "88", "NO_COLOR": "1"})
        with width, contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*self.arguments, "--help"])
        text = printed.getvalue()
        assert text.startswith("usage"), text
        return [nodes.literal_block(text, text, language="text")]


def setup(app):
    """Register both."""
    app.add_directive("plan-schema", PlanSchema)
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
