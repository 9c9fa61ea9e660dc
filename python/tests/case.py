"""Base class of all tests. To run the tests without the wheel:

    PYTHONPATH=python/src RLOOD_BINARY=target/release/rlood python3 -m unittest discover python/tests
"""

import tempfile
import unittest
from pathlib import Path
from unittest import mock

import rlood


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def enterContext(self, context):  # Python 3.11 has it
        value = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return value

    def hurried(self):
        """Removes the pauses after failures."""
        for module in ("client", "transfer"):
            self.enterContext(mock.patch(f"rlood.{module}.pause_s", lambda _: 0.0))

    def refused(self, status, code, call, *arguments, **named):
        with self.assertRaises(rlood.Error) as caught:
            call(*arguments, **named)
        self.assertEqual((caught.exception.status, caught.exception.code), (status, code), caught.exception)
        return caught.exception
