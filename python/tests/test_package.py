"""Tests of keys, profiles and the binary."""

import json
import os
import subprocess
import sys
import unittest
from unittest import mock

import rlood
from case import Case
from rlood.profile import Profile


class Keys(Case):
    def test_a_key_opens_a_server_that_asks_for_one(self):
        key = "k" * 20
        with rlood.serve(None, "--api-key", key, "--devices", "none") as client:
            self.refused(401, "unauthorized", client.jobs)
            self.assertEqual(rlood.Client(client.server, key=key).jobs(), [])
            with mock.patch.dict(os.environ, {"RLOOD_SERVER": client.server, "RLOOD_KEY": key}):
                self.assertEqual(rlood.Client().jobs(), [])

    def test_a_refusal_of_a_large_upload_is_heard(self):
        path = self.folder / "rows.jsonl"
        path.write_text(json.dumps({"prompt": "x" * 1000}) + "\n")
        path.write_bytes(path.read_bytes() * 40_000)
        with rlood.serve(None, "--api-key", "k" * 20, "--devices", "none") as client:
            self.refused(401, "unauthorized", client.upload_dataset, path)

    def test_a_server_that_does_not_start_says_why(self):
        with self.assertRaisesRegex(RuntimeError, "(?s)did not start.*--no-such-flag"):
            with rlood.serve(None, "--no-such-flag"):
                pass

    def test_the_package_runs_the_binary(self):
        here = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
        said = subprocess.run([sys.executable, "-m", "rlood", "--version"], env=here, stdout=subprocess.PIPE, check=True).stdout
        self.assertEqual(said, subprocess.run([rlood.find_rlood_bin(), "--version"], stdout=subprocess.PIPE, check=True).stdout)
        self.assertRegex(said.decode(), r"^rlood \d+\.\d+\.\d+")


class Profiles(Case):
    def find(self, *arguments, text=None, **variables):
        (self.folder / "rlood").mkdir(exist_ok=True)
        if text is not None:
            (self.folder / "rlood/config.toml").write_text(text)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RLOOD_")}
        with mock.patch.dict(os.environ, {**clean, "XDG_CONFIG_HOME": str(self.folder), **variables}, clear=True):
            return Profile.find(*arguments)[:2]

    def test_without_a_file_arguments_come_before_variables(self):
        self.assertEqual(self.find(), ("http://127.0.0.1:8080", None))
        self.assertEqual(self.find(RLOOD_SERVER="https://a/", RLOOD_KEY="k"), ("https://a", "k"))
        self.assertEqual(self.find("http://b", RLOOD_SERVER="https://a", RLOOD_KEY="k"), ("http://b", "k"))
        self.assertEqual(self.find("http://b", "", RLOOD_KEY="k"), ("http://b", None))
        for address in ("127.0.0.1:8080", "ftp://host", "http://"):
            with self.assertRaisesRegex(ValueError, "write http://HOST:PORT"):
                self.find(address)

    @unittest.skipIf(sys.version_info < (3, 11), "tomllib came with Python 3.11")
    def test_a_profiles_key_goes_to_its_server_alone(self):
        text = 'default = "a"\n[profiles.a]\nserver = "http://a"\nkey = "ka"\n[profiles.b]\nserver = "http://b/"\nkey_command = "echo kb"\n'
        self.assertEqual(self.find(text=text), ("http://a", "ka"))
        self.assertEqual(self.find(text=text, RLOOD_PROFILE="b"), ("http://b", "kb"))
        self.assertEqual(self.find(None, None, "b", text=text, RLOOD_KEY="k", RLOOD_SERVER="http://c"), ("http://b", "kb"))
        self.assertEqual(self.find("http://b", text=text), ("http://b", "kb"))
        self.assertEqual(self.find("http://c", text=text), ("http://c", None))
        self.assertEqual(self.find(text=text, RLOOD_SERVER="http://c", RLOOD_PROFILE="b"), ("http://c", None))
        self.assertEqual(self.find(text=text, RLOOD_KEY="k"), ("http://a", "k"))
        with self.assertRaisesRegex(ValueError, "no profile 'c'.*there are: a, b"):
            self.find(None, None, "c", text=text)
        with self.assertRaisesRegex(ValueError, "profile 'b' is for http://b/, not for http://a"):
            self.find("http://a", None, "b", text=text)
        with self.assertRaisesRegex(ValueError, "printed no key"):
            self.find(text=text.replace("echo kb", "exit 3"), RLOOD_PROFILE="b")
        with self.assertRaisesRegex(ValueError, "not valid TOML"):
            self.find(text="default =")


if __name__ == "__main__":
    unittest.main()
