"""Python runs this at the start of new interpreters of a command with a fault."""

from tests.helpers.faults.disk import install

install()
