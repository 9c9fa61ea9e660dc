"""Tests of the client with a real server."""

import contextlib
import hashlib
import io
import json
import os
import ssl
import tarfile
import tempfile
import time
import typing
import unittest
import urllib.error
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import rlood
from case import Case
from flaky import Flaky
from rlood import transfer, types

ADD = [{"role": "user", "content": "Add 76 and 45."}]


def job_of(rows=8, **changes):
    """Returns the specification of a job that takes about a second."""
    return {
        "name": "short",
        "model": "rlood/tiny",
        "dataset": {"records": [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(rows)]},
        "rewards": [{"type": "exact_match", "column": "answer"}],
        "rloo": {"num_generations": 2},
        "sampling": {"max_completion_length": 4},
        "training": {"prompts_per_step": 4, "max_steps": 2},
        **changes,
    }


def setUpModule():
    """Tests with one shared server, on which the demo job has finished."""
    stack = contextlib.ExitStack()
    unittest.addModuleCleanup(stack.close)
    WithServer.data = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    WithServer.client = stack.enter_context(rlood.serve(WithServer.data))
    WithServer.demo = WithServer.client.request("POST", "/demo")["id"]
    WithServer.events = list(WithServer.client.watch(WithServer.demo))


class WithServer(Case):
    def flaky(self, *plan):
        proxy = self.enterContext(Flaky(self.client.server, plan))
        return proxy, rlood.Client(proxy.url, key="")

    def tree(self, folder):
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(folder).iterdir()}


class Reading(WithServer):
    def test_events_come_once_each_and_in_order_until_the_job_is_over(self):
        self.assertEqual([event["seq"] for event in self.events], list(range(1, len(self.events) + 1)))
        self.assertIn("job.succeeded", [event["type"] for event in self.events])
        last = self.events[-1]["seq"]
        later = [event["seq"] for event in self.client.watch(self.demo, after=last - 2)]
        self.assertEqual(later[:2], [last - 1, last])

    def test_a_stream_is_left_when_the_job_is_over_although_its_verdict_is_not(self):
        line = "event: {}\ndata: {{\"seq\": {}}}\n\n"
        told = [("job.failed", 1), ("job.queued", 2), ("job.succeeded", 3), ("verdict.queued", 4), ("step", 5)]
        stream = "".join(line.format(*one) for one in told).encode().splitlines(keepends=True)
        states = iter(["running", "running", "succeeded"])  # at the beginning, after job.failed, after job.succeeded
        job = lambda: {"state": next(states), "last_seq": 4}  # noqa: E731
        names = [name for name, _ in transfer.events_of_job(stream, 0, job)]
        self.assertEqual(names, ["job.failed", "job.queued", "job.succeeded", "verdict.queued", "end"])
        done = lambda: {"state": "failed", "last_seq": 7}  # noqa: E731
        self.assertEqual(list(transfer.events_of_job(iter(()), 7, done)), [("end", None)])
        self.assertEqual(list(transfer.events_of_job(iter(()), 6, done)), [], "the connection was cut")

    def test_metrics_are_records(self):
        rows = self.client.metrics(self.demo)
        self.assertEqual([row["step"] for row in rows], list(range(41)))
        self.assertIn("eval_reward", rows[40])
        rows = self.client.metrics(self.demo, keys=["reward", "kl"], min_step=39)
        self.assertEqual([sorted(row) for row in rows], [["kl", "reward", "step"]] * 2)

    def test_samples_are_filtered_and_limited_over_pages(self):
        samples = self.client.samples(self.demo, limit=150, phase="train")
        page = self.client.request("GET", f"/jobs/{self.demo}/samples", limit=100, phase="train")
        self.assertEqual(samples[:100], page["data"])
        self.assertEqual(samples[100:], self.client.request("GET", f"/jobs/{self.demo}/samples", limit=50, phase="train", after=page["next"])["data"])
        self.assertEqual(len(self.client.samples(self.demo, limit=3)), 3)
        self.assertEqual(len(self.client.samples(self.demo, limit=None, step=40, phase="train")), 32 * 8)
        worst = self.client.samples(self.demo, sort="worst", limit=5)
        self.assertEqual({sample["reward"] for sample in worst}, {0.0})

    def test_both_models_answer_a_prompt(self):
        answer = self.client.generate(self.demo, ADD, sampling={"temperature": 0}, checkpoint="last")
        self.assertEqual(answer["trained"][0]["completion"], "121")
        self.assertEqual((answer["step"], len(answer["base"])), (40, 1))

    def test_the_verdict_is_the_newest_or_a_new_one(self):
        verdict = self.client.verdict(self.demo, timeout=120)
        self.assertEqual(verdict["result"]["verdict"], "better", verdict)
        self.assertEqual(self.client.verdict(self.demo)["id"], verdict["id"])
        other = self.client.verdict(self.demo, checkpoint="last", timeout=120)
        self.assertEqual((other["step"], other["state"]), (40, "succeeded"), other)
        self.assertNotEqual(other["id"], verdict["id"])
        again = self.client.verdict(self.demo, new=True, wait=False)
        self.assertIn(again["state"], ("queued", "running", "succeeded"))
        self.assertNotIn(again["id"], (verdict["id"], other["id"]))
        won = list(self.client.pages(f"/verdicts/{verdict['id']}/rows", outcome="won", limit=50))
        self.assertEqual(len(won), verdict["result"]["won"])

    def test_answers_are_what_the_types_say(self):
        verdict = self.client.verdict(self.demo, timeout=120)
        answers = {
            types.Job: self.client.job(self.demo),
            types.Event: self.events[0],
            types.Sample: self.client.samples(self.demo, limit=1)[0],
            types.Verdict: verdict,
            types.VerdictResult: verdict["result"],
            types.Summary: self.client.request("GET", f"/jobs/{self.demo}/summary"),
            types.Dataset: next(self.client.pages("/datasets")),
            types.Model: next(self.client.pages("/models")),
            types.GenerationResult: self.client.generate(self.demo, "1+1="),
        }
        for kind, answer in answers.items():
            fields = typing.get_type_hints(kind)
            self.assertLessEqual(set(answer), set(fields), kind)
            self.assertLessEqual(kind.__required_keys__, set(answer), kind)

    def test_every_type_can_be_resolved(self):
        kinds = [kind for kind in vars(types).values() if isinstance(kind, type) and kind.__module__ == types.__name__]
        self.assertGreater(len(kinds), 50)
        for kind in kinds:
            typing.get_type_hints(kind)


class Pulling(WithServer):
    def test_an_adapter_and_a_checkpoint_become_folders(self):
        self.assertEqual(self.client.pull(self.demo, self.folder / "a" / "adapter"), self.folder / "a" / "adapter")
        files = ["adapter_config.json", "adapter_model.safetensors", "certificate.json"]
        self.assertEqual(sorted(self.tree(self.folder / "a/adapter")), files)
        self.assertEqual(os.listdir(self.folder / "a"), ["adapter"])
        checkpoint = next(self.client.pages(f"/jobs/{self.demo}/checkpoints"))
        (self.folder / "empty").mkdir()
        self.client.pull(checkpoint["id"], self.folder / "empty")
        listed = {file["name"]: file["sha256"] for file in checkpoint["files"]}
        pulled = self.tree(self.folder / "empty")
        self.assertEqual({name: pulled[name] for name in listed}, listed)

    def test_what_exists_is_left_alone(self):
        (self.folder / "mine").write_text("mine")
        for target in (self.folder, self.folder / "mine"):
            with self.assertRaisesRegex(FileExistsError, "choose another folder"):
                self.client.pull(self.demo, target)
        self.assertEqual(os.listdir(self.folder), ["mine"])

    def test_a_transfer_that_is_cut_goes_on_from_there(self):
        self.hurried()
        proxy, client = self.flaky(*[("GET", "pass", None), ("GET", "cut", 100_000), ("GET", "pass", None), ("GET", "cut", 50_000)])
        client.pull(self.demo, self.folder / "cut")
        self.client.pull(self.demo, self.folder / "whole")
        self.assertEqual(self.tree(self.folder / "cut"), self.tree(self.folder / "whole"))
        ranges = [headers.get("Range") for _, headers in proxy.seen]
        self.assertEqual([one for one in ranges if one != "bytes=0-0"], [None, "bytes=100000-", "bytes=150000-"])

    def test_a_later_call_takes_up_what_an_earlier_one_left(self):
        self.hurried()
        proxy, client = self.flaky(("GET", "pass", None), ("GET", "cut", 100_000))
        proxy.plan += [("GET", fault, 0) for _ in range(transfer.MOST_TRIES) for fault in ("pass", "cut")]
        error = self.refused(0, "interrupted", client.pull, self.demo, self.folder / "adapter")
        self.assertIn("at byte 100000 of", error.detail)
        self.assertFalse((self.folder / "adapter").exists())
        proxy.plan.clear()
        proxy.seen.clear()
        client.pull(self.demo, self.folder / "adapter")
        self.assertEqual([headers["Range"] for _, headers in proxy.seen], ["bytes=0-0", "bytes=100000-"])
        self.assertEqual(os.listdir(self.folder), ["adapter"])

    def test_an_archive_with_a_wrong_byte_is_asked_for_again_and_never_kept(self):
        self.hurried()
        plan = [("GET", "pass", None), ("GET", "flip", 300_000)]
        proxy, client = self.flaky(*plan, *plan)
        client.pull(self.demo, self.folder / "adapter")
        self.client.pull(self.demo, self.folder / "whole")
        self.assertEqual(self.tree(self.folder / "adapter"), self.tree(self.folder / "whole"))
        proxy.plan += plan * transfer.DAMAGED_TRIES
        self.refused(0, "damaged", client.pull, self.demo, self.folder / "other")
        self.assertEqual(sorted(os.listdir(self.folder)), ["adapter", "whole"])

    def test_a_job_without_a_checkpoint_says_so(self):
        with rlood.serve(None, "--devices", "none") as client:
            job = client.request("POST", "/demo")["id"]
            self.refused(404, "no_checkpoint", client.pull, job, self.folder / "adapter")
            self.refused(404, "not_found", client.pull, "job_" + "0" * 26, self.folder / "adapter")
        self.assertEqual(os.listdir(self.folder), [])

    def test_a_checkpoint_is_merged_into_its_base_model(self):
        export = self.client.export(self.demo, self.folder / "merged", dtype="float32", timeout=300)
        self.assertEqual(export["dtype"], "float32")
        listed = {file["name"]: file["sha256"] for file in export["files"]}
        self.assertEqual(self.tree(self.folder / "merged"), listed)
        self.assertIn("config.json", listed)

    def test_a_push_without_an_account_is_refused(self):
        error = self.refused(422, "invalid_body", self.client.push, self.demo, "adapter", private=True)
        self.assertIn("give org/adapter", error.detail)


class Unpacking(Case):
    """Tests with archives that a correct server never sends."""

    def archive(self, *members):
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w") as tar:
            for name, kind, text in members:
                member = tarfile.TarInfo(name)
                member.type, member.size, member.linkname = kind, len(text), "/etc/passwd"
                tar.addfile(member, io.BytesIO(text))
        identity = hashlib.sha256("".join(f"{name}\0{hashlib.sha256(text).hexdigest()}\n" for name, _, text in members).encode())
        return made.getvalue(), f'"tar-{identity.hexdigest()}"'

    def download(self, archive, tag):
        def open_range(_):
            headers = {"ETag": tag, "Content-Range": None, "Content-Length": str(len(archive))}
            return contextlib.nullcontext(SimpleNamespace(read=io.BytesIO(archive).read, status=200, headers=headers))

        return transfer.download_folder(open_range, self.folder / "to")

    def test_plain_files_are_unpacked(self):
        self.download(*self.archive(("a", tarfile.REGTYPE, b"1"), ("b", tarfile.REGTYPE, b"")))
        self.assertEqual((self.folder / "to/a").read_bytes() + (self.folder / "to/b").read_bytes(), b"1")

    def test_names_that_lead_elsewhere_and_links_are_refused(self):
        for name, kind in (("../a", tarfile.REGTYPE), ("/a", tarfile.REGTYPE), ("..", tarfile.REGTYPE), ("a", tarfile.SYMTYPE), ("a", tarfile.DIRTYPE)):
            self.refused(0, "damaged", self.download, *self.archive((name, kind, b"")))
            self.assertEqual(os.listdir(self.folder), [], name)


class Writing(WithServer):
    def test_a_job_is_a_dict_or_a_file_in_three_forms(self):
        (self.folder / "job.json").write_text(json.dumps(job_of(name="json")))
        (self.folder / "job.yaml").write_text(
            "name: yaml\nmodel: rlood/tiny\ndataset: {records: [{prompt: '1+1=', answer: '2'}]}\n"
            "rewards: [{type: exact_match, column: answer}]\ntraining: {max_steps: 1, prompts_per_step: 1}\n"
        )
        (self.folder / "job.toml").write_text(
            'name = "toml"\nmodel = "rlood/tiny"\nrewards = [{type = "exact_match", column = "answer"}]\n'
            'dataset = {records = [{prompt = "1+1=", answer = "2"}]}\ntraining = {max_steps = 1, prompts_per_step = 1}\n'
        )
        for kind in ("json", "yaml", "toml"):
            job = self.client.submit(self.folder / f"job.{kind}", wait=True)
            self.assertEqual((job["name"], job["state"]), (kind, "succeeded"))
        self.assertEqual(self.client.submit(job_of(), wait=True)["state"], "succeeded")
        self.assertEqual([job["name"] for job in self.client.jobs(limit=2)], ["short", "toml"])
        self.assertEqual(self.client.jobs(state="failed"), [])

    def test_waiting_ends_with_the_job_with_its_pause_or_in_time(self):
        job = self.client.submit(job_of(training={"prompts_per_step": 4, "max_steps": 100_000}))["id"]
        with self.assertRaisesRegex(TimeoutError, f"{job} is still (queued|running) after 0.5 s"):
            self.client.wait(job, timeout=0.5)
        self.client.request("POST", f"/jobs/{job}/pause")
        self.assertEqual(self.client.wait(job, timeout=60)["state"], "paused")
        self.client.request("POST", f"/jobs/{job}/cancel")
        self.assertEqual(self.client.wait(job, timeout=60)["state"], "cancelled")

    def test_rows_and_files_are_uploaded_and_mapped(self):
        rows = ({"question": f"é{number}", "answer": number} for number in range(5))
        dataset = self.client.upload_dataset(rows, name='a "name"', map={"prompt": "question", "keep": []}, limit=3)
        self.assertEqual((dataset["name"], dataset["num_rows"], dataset["columns"]), ('a "name"', 3, ["prompt"]))
        path = self.folder / 'ques"tions.csv'
        path.write_text("prompt,answer\n1+1=,2\n2+2=,4\n")
        self.assertEqual(self.client.upload_dataset(path)["columns"], ["prompt", "answer"])
        error = self.refused(422, "invalid_dataset", self.client.upload_dataset, [{"question": "?"}])
        self.assertTrue(error.errors[0]["pointer"], error)
        with self.assertRaises(FileNotFoundError):
            self.client.upload_dataset(self.folder / "missing.csv")

    def test_a_dataset_of_the_hub_is_named_with_its_settings(self):
        with mock.patch.object(self.client, "request", return_value={"state": "downloading"}) as request:
            dataset = self.client.add_dataset("openai/gsm8k", config="main", split=None, map={"prompt": "question"})
        wanted = {"hub": "openai/gsm8k", "config": "main", "map": {"prompt": "question"}}
        request.assert_called_once_with("POST", "/datasets", wanted)
        self.assertEqual(dataset["state"], "downloading")
        self.assertIn("org/name", self.refused(422, "invalid_body", self.client.add_dataset, "none//name").detail)

    def test_a_model_is_registered_by_its_folder(self):
        model = self.client.add_model("mine/copy", source=str(self.data / "demo-model"))
        self.assertIn("mine/copy", [model["id"] for model in self.client.pages("/models")])
        self.assertEqual(model["id"], "mine/copy")
        self.refused(422, "invalid_model", self.client.add_model, "mine/none", source="/nonexistent")

    def test_a_refusal_says_everything_that_is_wrong(self):
        error = self.refused(422, "invalid_spec", self.client.submit, {"model": "none", "rewards": []})
        self.assertLessEqual({"/model", "/dataset", "/rewards"}, {item["pointer"] for item in error.errors})
        self.assertRegex(error.request_id, "^req_")
        for part in (error.request_id, "/dataset: ", "422 invalid_spec"):
            self.assertIn(part, str(error))


class Failing(WithServer):
    def test_a_request_whose_answer_was_lost_is_done_once(self):
        self.hurried()
        faults = [("drop", None), ("lose", None), ("cut", 20), ("refuse", (503, {"Retry-After": "0"})), ("refuse", (502, {}))]
        for number, fault in enumerate(faults):
            proxy, client = self.flaky(("POST /jobs", *fault))
            job = client.submit(job_of(name=f"once {number}"))
            made = [other["id"] for other in self.client.jobs() if other["name"] == f"once {number}"]
            self.assertEqual(made, [job["id"]], fault)
            keys = {headers["Idempotency-Key"] for _, headers in proxy.seen}
            self.assertEqual((len(proxy.seen), len(keys)), (2, 1), fault)
            self.client.request("POST", f"/jobs/{job['id']}/cancel")

    def test_a_deletion_whose_answer_was_lost_is_done(self):
        self.hurried()
        dataset = self.client.upload_dataset([{"prompt": "deleted"}])["id"]
        proxy, client = self.flaky(("DELETE", "lose", None))
        self.assertIsNone(client.request("DELETE", f"/datasets/{dataset}"))
        self.assertEqual(len(proxy.seen), 2)
        self.refused(404, "not_found", client.request, "DELETE", f"/datasets/{dataset}")

    def test_the_server_says_how_long_to_wait(self):
        proxy, client = self.flaky(("GET", "refuse", (429, {"Retry-After": "1"})))
        began = time.monotonic()
        client.job(self.demo)
        self.assertGreaterEqual(time.monotonic() - began, 1.0)
        proxy.plan.append(("GET", "refuse", (503, {"Retry-After": "3600"})))
        self.refused(503, "overloaded", client.job, self.demo)
        self.assertEqual(len(proxy.seen), 3)

    def test_what_will_not_pass_is_not_repeated(self):
        proxy, client = self.flaky()
        self.refused(422, "invalid_spec", client.submit, {})
        self.refused(404, "no_verdict", client.request, "GET", f"/jobs/{client.submit(job_of())['id']}/verdict")
        self.assertEqual(len(proxy.seen), 3)

    def test_a_stream_that_is_cut_goes_on_without_gap_or_repetition(self):
        self.hurried()
        plan = [("/events", "cut", bytes_) for bytes_ in (0, 700, 3_001)] + [("/events", "drop", None), ("/events", "refuse", (503, {}))]
        proxy, client = self.flaky(*plan, ("/events", "cut", 20_000))
        events = list(client.watch(self.demo))
        self.assertEqual([event["seq"] for event in events], list(range(1, len(events) + 1)))
        self.assertGreaterEqual(len(events), len(self.events))
        asked = [seen for seen in proxy.seen if "/events" in seen[0]]
        self.assertEqual((len(asked), proxy.plan), (7, []))
        self.assertGreater(int(self.header(asked[-1], "last-event-id")), 5)

    def header(self, seen, name):
        return {key.lower(): value for key, value in seen[1].items()}[name]

    def test_a_server_that_stays_away_is_an_error_with_its_address(self):
        self.hurried()
        proxy = Flaky(self.client.server)
        proxy.server_close()
        error = self.refused(0, "unreachable", rlood.Client(proxy.url, key="").job, self.demo)
        self.assertIn(proxy.url, error.detail)
        self.assertIn("rlood serve", error.detail)

    def test_a_certificate_that_is_not_valid_is_not_tried_again(self):
        cause = urllib.error.URLError(ssl.SSLCertVerificationError("self-signed certificate"))
        self.assertFalse(rlood.Error.unreachable("GET /jobs", cause).may_pass())
        self.assertTrue(rlood.Error.unreachable("GET /jobs", urllib.error.URLError(ConnectionResetError())).may_pass())

    def test_a_token_of_the_hub_is_sent_with_every_request(self):
        with Flaky(self.client.server) as proxy:
            rlood.Client(proxy.url, hub_token=" hf_argument ").jobs()
            with mock.patch.dict(os.environ, RLOOD_HUB_TOKEN="hf_variable"):
                rlood.Client(proxy.url).jobs()
                rlood.Client(proxy.url, hub_token="").jobs()
            sent = [{name.lower(): value for name, value in headers.items()}.get("x-hub-token") for _, headers in proxy.seen]
        self.assertEqual(sent, ["hf_argument", "hf_variable", None])

    def test_a_redirect_does_not_get_the_key(self):
        with Flaky(self.client.server) as elsewhere:
            proxy, _ = self.flaky(("GET", "refuse", (302, {"Location": elsewhere.url})))
            with self.assertRaises(rlood.Error) as caught:
                rlood.Client(proxy.url, key="rld_secret").job(self.demo)
            self.assertEqual((caught.exception.status, elsewhere.seen), (302, []))

    def test_a_page_of_a_proxy_is_quoted(self):
        answer = mock.Mock(code=403, reason="Forbidden", headers={}, read=lambda _: b"<h1>Go away</h1>")
        error = rlood.Error.of(answer)
        self.assertEqual((error.status, error.code, error.detail), (403, "http", "Forbidden: <h1>Go away</h1>"))


if __name__ == "__main__":
    unittest.main()
