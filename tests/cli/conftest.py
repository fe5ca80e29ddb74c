"""Fixtures of the command's tests."""

from tests.helpers.command_line import cli as cli
from tests.helpers.command_line import ended as ended
