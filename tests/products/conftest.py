"""Fixtures of the tests of products that fold."""

from tests.helpers.command_line import cli as cli
from tests.helpers.command_line import ended as ended
