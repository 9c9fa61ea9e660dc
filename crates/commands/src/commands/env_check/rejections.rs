//! Checks with requests that a server must refuse: badly signed or malformed ones. Also requests of later versions.

use serde_json::{Value, json};

use super::super::contract_check::SIGNATURE_CASES;
use super::super::contract_check::wire::Signing;
use super::{Check, Outcome, PLAIN, plain, read_reply};

impl Check {
    /// Checks that badly signed requests are refused, and that two signatures, as during a rotation, are accepted.
    pub(super) async fn signatures(&mut self, begins: bool) {
        if self.wire.key.is_none() {
            return;
        }
        for case in &SIGNATURE_CASES {
            let play = self.new_play();
            let question = self.reset_question(&play);
            let (outcome, detail) = case.judge(self.send(&question, case.signing).await);
            self.find(case.check, outcome, detail, case.fix_of(outcome));
        }
        if !begins {
            return;
        }
        let play = self.new_play();
        let question = self.reset_question(&play);
        let what = "two signatures, the second one right (as while a secret is rotated)";
        match self.send(&question, Signing::Rotating).await {
            Ok(got) if got.is_success() => self.find("rotation", Outcome::Ok, format!("{what}: accepted"), ""),
            Ok(got) => {
                let fix = "webhook-signature may contain several signatures, separated by spaces: one valid signature is enough";
                self.find("rotation", Outcome::Failed, format!("{what}: refused ({})", got.status), fix);
            }
            Err(why) => self.find("rotation", Outcome::Failed, format!("{what}: {why}"), ""),
        }
    }

    /// Checks that malformed requests are refused and do not crash the server.
    pub(super) async fn malformed(&mut self) {
        let play = self.new_play();
        let text = self.reset_question(&play).body;
        let mut request: Value = serde_json::from_str(&text).unwrap_or_default();
        let mut no_episode = request.clone();
        if let Some(object) = no_episode.as_object_mut() {
            object.shift_remove("episode");
        }
        request["type"] = json!("env.something.else");
        let cases = [
            ("a body that is not JSON", "{\"type\": \"env.reset.request\", oops".to_owned()),
            ("a request cut in the middle", text.chars().take(text.chars().count() / 2).collect()),
            ("an empty body", String::new()),
            ("a JSON list", "[1, 2, 3]".to_owned()),
            ("a request without episode", no_episode.to_string()),
            ("an unknown type", request.to_string()),
        ];
        let (mut crashed, mut accepted, mut refused) = (Vec::new(), Vec::new(), 0);
        for (index, (what, body)) in cases.into_iter().enumerate() {
            match self.wire.post(&format!("env_malformed_{index}"), &body, Signing::Right).await {
                Err(why) => crashed.push(format!("{what} ({why})")),
                Ok(got) if got.status >= 500 => crashed.push(format!("{what} ({})", got.status)),
                Ok(got) if got.is_success() => accepted.push(format!("{what} ({})", got.status)),
                Ok(_) => refused += 1,
            }
        }
        let fix =
            "answer 400 or 422 with the reason: a 5xx or a broken connection means 'retry', and 2xx hides the error";
        if !crashed.is_empty() {
            let detail = format!("answered with a server error: {}", crashed.join(", "));
            self.find("malformed", Outcome::Failed, detail, fix);
        } else if accepted.is_empty() {
            self.find("malformed", Outcome::Ok, format!("{refused} malformed requests, all refused with 4xx"), "");
        } else {
            self.find("malformed", Outcome::Warning, format!("accepted: {}", accepted.join(", ")), fix);
        }
    }

    /// Sends fields of a later minor version, and an unknown version.
    pub(super) async fn tolerance(&mut self) {
        let what = "fields that the contract does not have yet";
        let fix = "ignore unknown fields: the contract adds fields without a new version";
        let result = match self.begin().await {
            Err(why) => Err(why),
            Ok((play, _)) => {
                let mut question = self.step_question(&play, plain(PLAIN), false);
                let mut body: Value = serde_json::from_str(&question.body).unwrap_or_default();
                body["from_the_future"] = json!({"a": [1, 2]});
                body["episode"]["team"] = json!("blue");
                body["message"]["annotations"] = json!([]);
                question.body = body.to_string();
                match self.send(&question, Signing::Right).await {
                    Ok(got) => read_reply(&got, &question).map(drop),
                    Err(why) => Err(why),
                }
            }
        };
        match result {
            Ok(()) => self.find("unknown_fields", Outcome::Ok, format!("{what} are ignored"), ""),
            Err(why) => self.find("unknown_fields", Outcome::Failed, format!("{what}: {why}"), fix),
        }
        let play = self.new_play();
        let mut question = self.reset_question(&play);
        let mut body: Value = serde_json::from_str(&question.body).unwrap_or_default();
        body["version"] = json!("2");
        question.body = body.to_string();
        let what = "a request of version \"2\"";
        let fix = "answer 4xx to an unsupported version, or answer it as \"1\"";
        match self.send(&question, Signing::Right).await {
            Ok(got) if got.status >= 500 => {
                self.find("unknown_version", Outcome::Failed, format!("{what}: {}", got.status), fix);
            }
            Ok(got) if got.is_success() => match read_reply(&got, &question) {
                Ok(_) => self.find("unknown_version", Outcome::Ok, format!("{what} is answered nevertheless"), ""),
                Err(why) => self.find("unknown_version", Outcome::Warning, format!("{what}: {why}"), fix),
            },
            Ok(got) => self.find("unknown_version", Outcome::Ok, format!("{what} is refused ({})", got.status), ""),
            Err(why) => self.find("unknown_version", Outcome::Failed, format!("{what}: {why}"), fix),
        }
    }
}
