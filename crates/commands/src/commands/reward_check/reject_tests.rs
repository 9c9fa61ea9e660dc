//! Checks with requests that a service must reject: unsigned or malformed ones. Also checks requests of later versions.

use serde_json::json;

use super::super::contract_check::SIGNATURE_CASES;
use super::wire::{Got, Signing};
use super::{Check, Outcome, new_id, read};

impl Check {
    /// Checks that unsigned requests are refused, and that two signatures, as during a rotation, are accepted.
    pub(super) async fn signatures(&mut self, answers: bool) {
        if self.wire.key.is_none() {
            return;
        }
        for case in &SIGNATURE_CASES {
            let (outcome, detail) = case.judge(self.signed(case.signing).await);
            self.find(case.check, outcome, detail, case.fix_of(outcome));
        }
        if !answers {
            return;
        }
        let what = "two signatures, the second one right (as while a secret is rotated)";
        match self.signed(Signing::Rotating).await {
            Ok(got) if got.is_success() => self.find("rotation", Outcome::Ok, format!("{what}: accepted"), ""),
            Ok(got) => {
                let fix = "webhook-signature may contain several signatures, separated by spaces: one valid signature is enough";
                self.find("rotation", Outcome::Failed, format!("{what}: refused ({})", got.status), fix);
            }
            Err(why) => self.find("rotation", Outcome::Failed, format!("{what}: {why}"), ""),
        }
    }

    async fn signed(&self, signing: Signing) -> Result<Got, String> {
        let id = new_id();
        let body = self.request(&id, &self.samples[..1]).to_string();
        self.wire.post(&id, &body, signing).await
    }

    /// Checks that malformed requests are refused and do not crash the service.
    pub(super) async fn malformed(&mut self) {
        let id = new_id();
        let request = self.request(&id, &self.samples[..1]);
        let (mut no_samples, mut not_samples, mut unknown) = (request.clone(), request.clone(), request.clone());
        if let Some(object) = no_samples.as_object_mut() {
            object.shift_remove("samples");
        }
        not_samples["samples"] = json!("all of them");
        unknown["type"] = json!("reward.something.else");
        let text = request.to_string();
        let cut: String = text.chars().take(text.chars().count() / 2).collect();
        let cases = [
            ("a body that is not JSON", "{\"type\": \"reward.score.request\", oops".to_owned()),
            ("a request cut in the middle", cut),
            ("an empty body", String::new()),
            ("a JSON list", "[1, 2, 3]".to_owned()),
            ("a request without samples", no_samples.to_string()),
            ("a request whose samples are a text", not_samples.to_string()),
            ("an unknown type", unknown.to_string()),
        ];
        let (mut crashed, mut accepted, mut refused) = (Vec::new(), Vec::new(), 0);
        for (what, body) in cases {
            match self.wire.post(&new_id(), &body, Signing::Right).await {
                Err(why) => crashed.push(format!("{what} ({why})")),
                Ok(got) if got.status >= 500 => crashed.push(format!("{what} ({})", got.status)),
                Ok(got) if got.is_success() => accepted.push(format!("{what} ({})", got.status)),
                Ok(_) => refused += 1,
            }
        }
        if !crashed.is_empty() {
            let fix = "answer 400 or 422 with the reason: a 5xx or a broken connection means 'retry', and the same \
                       request would be repeated";
            let detail = format!("answered with a server error: {}", crashed.join(", "));
            self.find("malformed", Outcome::Failed, detail, fix);
        }
        if !accepted.is_empty() {
            let fix = "answer 400 or 422 with the reason: the sender should see the error";
            self.find("malformed", Outcome::Warning, format!("accepted: {}", accepted.join(", ")), fix);
        }
        if crashed.is_empty() && accepted.is_empty() {
            self.find("malformed", Outcome::Ok, format!("{refused} malformed requests, all refused with 4xx"), "");
        }
    }

    /// Sends fields of a later minor version, and an unknown version.
    pub(super) async fn tolerance(&mut self) {
        let id = new_id();
        let samples = self.samples[..1].to_vec();
        let mut request = self.request(&id, &samples);
        request["from_the_future"] = json!({"a": [1, 2]});
        request["job"]["project"] = json!("p");
        request["reward"]["revision"] = json!(7);
        request["samples"][0]["logprob"] = json!(-1.25);
        let what = "fields that the contract does not have yet";
        let fix = "ignore unknown fields: the contract adds fields without a new version";
        match self.ask_with(&id, &request.to_string(), &samples).await {
            Ok(answer) => match self.problems(&answer, &samples).first() {
                None => self.find("unknown_fields", Outcome::Ok, format!("{what} are ignored"), ""),
                Some(problem) => self.find("unknown_fields", Outcome::Failed, format!("{what}: {problem}"), fix),
            },
            Err(why) => self.find("unknown_fields", Outcome::Failed, format!("{what}: {why}"), fix),
        }
        let id = new_id();
        let mut request = self.request(&id, &samples);
        request["version"] = json!("2");
        let what = "a request of version \"2\"";
        match self.wire.post(&id, &request.to_string(), Signing::Right).await {
            Ok(got) if got.status >= 500 => {
                let fix = "answer 4xx to an unsupported version (or answer it as \"1\"): a 5xx is retried for minutes";
                self.find("unknown_version", Outcome::Failed, format!("{what}: {}{}", got.status, got.excerpt()), fix);
            }
            Ok(got) if got.is_success() => match read(&got, &id, &samples) {
                Ok(_) => self.find("unknown_version", Outcome::Ok, format!("{what} is answered nevertheless"), ""),
                Err(why) => {
                    let fix = "answer it as \"1\", or return 4xx";
                    self.find("unknown_version", Outcome::Warning, format!("{what}: {why}"), fix);
                }
            },
            Ok(got) => self.find("unknown_version", Outcome::Ok, format!("{what} is refused ({})", got.status), ""),
            Err(why) => {
                let fix = "answer 4xx to an unsupported version";
                self.find("unknown_version", Outcome::Failed, format!("{what}: {why}"), fix);
            }
        }
    }
}
