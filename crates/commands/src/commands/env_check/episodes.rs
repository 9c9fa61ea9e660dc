//! Checks that episodes begin, and that each is apart from the others.

use futures::future::join_all;
use serde_json::Value;

use super::super::contract_check::wire::Signing;
use super::{CLOSED, Check, Outcome, PLAIN, ping, plain, read_reply};
use crate::environment::{Ask, Reply};

/// Number of concurrent episodes.
const CONCURRENT: usize = 8;

impl Check {
    /// Checks that the server answers `env.ping`.
    pub(super) async fn is_reachable(&mut self) -> bool {
        let (id, body) = ping();
        let got = match self.wire.post(&id, &body, Signing::Right).await {
            Ok(got) => got,
            Err(why) => {
                let fix = "start the server, and give the URL at which this machine reaches it, path included";
                self.find("ping", Outcome::Failed, format!("the server did not answer a POST: {why}"), fix);
                return false;
            }
        };
        let detail = format!("the server answered {} to env.ping{}", got.status, got.excerpt());
        let fix =
            "answer {\"type\": \"env.ping\"} with any 2xx: a job that paused with environment_outage resumes by it";
        match got.status {
            200..=299 => {
                self.ping = serde_json::from_slice(&got.body).ok();
                self.find("ping", Outcome::Ok, format!("the server answered {} to env.ping", got.status), "");
            }
            300..=399 => {
                let to = got.location.as_deref().unwrap_or("another address").to_owned();
                let fix = format!("rlood never follows redirects: use {to} as the environment's url");
                self.find("ping", Outcome::Failed, detail, &fix);
                return false;
            }
            401 | 403 => {
                let fix = "it refuses the credentials: give the server's own --secret, or the --header that it expects";
                self.find("ping", Outcome::Failed, detail, fix);
                return false;
            }
            400 | 404 | 405 | 422 => self.find("ping", Outcome::Warning, detail, fix),
            _ => self.find("ping", Outcome::Failed, detail, fix),
        }
        true
    }

    /// Checks the beginning of episodes: valid, the same when it is repeated, and the same for all episodes of a group. Returns
    /// whether episodes begin at all.
    pub(super) async fn resets(&mut self) -> bool {
        let mut play = self.new_play();
        let question = self.reset_question(&play);
        let first = match self.send(&question, Signing::Right).await {
            Ok(got) => got,
            Err(why) => {
                self.find("reset", Outcome::Failed, why, "answer env.reset.request with messages and tools");
                return false;
            }
        };
        let answer = match read_reply(&first, &question) {
            Ok(Reply::Reset(answer)) => answer,
            Ok(other) => {
                self.find("reset", Outcome::Failed, format!("the reset was answered with {other:?}"), "");
                return false;
            }
            Err(why) => {
                let fix = "answer {\"version\": \"1\", \"id\": …, \"messages\": [{\"role\": \"user\", \"content\": \"…\"}], \"tools\": […]}";
                self.find("reset", Outcome::Failed, why, fix);
                return false;
            }
        };
        self.latencies.push(first.latency.as_secs_f64() * 1e3);
        let (messages, tools) = (answer.messages.len(), answer.tools.len());
        self.find("reset", Outcome::Ok, format!("an episode begins with {messages} messages and {tools} tools"), "");
        self.tools = answer.tools.clone();
        let fix = "keep the last answer of each episode, and send the same bytes when the request is repeated";
        match self.send(&question, Signing::Right).await {
            Ok(again) if again.is_success() && again.body == first.body => {
                self.find("reset_repeat", Outcome::Ok, "a repeated reset got the same bytes", "");
            }
            Ok(again) => {
                let detail = format!("a repeated reset (same id, same bytes) got another answer ({})", again.status);
                self.find("reset_repeat", Outcome::Failed, detail, fix);
            }
            Err(why) => self.find("reset_repeat", Outcome::Failed, why, fix),
        }
        let fix = "make messages and tools a function of episode.seed and the row: a group's episodes are compared with one another";
        for (check, what, attempt) in
            [("equal_resets", "another episode of the group", 0), ("restart", "the episode's attempt 1", 1)]
        {
            if attempt == 0 {
                play = self.new_play();
            }
            play.attempt = attempt;
            let question = self.reset_question(&play);
            match self.ask(&question).await {
                Ok(Reply::Reset(other)) if other.messages == answer.messages && other.tools == answer.tools => {
                    self.find(check, Outcome::Ok, format!("{what} begins with the same messages and tools"), "");
                }
                Ok(_) => {
                    let detail =
                        format!("{what} begins with other messages or tools, though seed and row are the same");
                    self.find(check, Outcome::Failed, detail, fix);
                }
                Err(why) => self.find(check, Outcome::Failed, format!("{what}: {why}"), fix),
            }
        }
        true
    }

    /// Plays a turn in several episodes at the same time.
    pub(super) async fn concurrency(&mut self) {
        let mut plays = Vec::new();
        for _ in 0..CONCURRENT {
            plays.push(self.new_play());
        }
        let this = &*self;
        let one = |mut play: super::Play| async move {
            let reset = this.reset_question(&play);
            let Reply::Reset(begun) = read_reply(&this.send(&reset, Signing::Right).await?, &reset)? else {
                return Err("the reset was not answered".to_owned());
            };
            play.session = begun.session;
            let step = this.step_question(&play, plain(PLAIN), false);
            read_reply(&this.send(&step, Signing::Right).await?, &step)
        };
        let answers = join_all(plays.into_iter().map(one)).await;
        let wrong: Vec<&String> = answers.iter().filter_map(|answer| answer.as_ref().err()).collect();
        let good: Vec<_> = answers.iter().filter_map(|answer| answer.as_ref().ok()).collect();
        let differs = good.windows(2).any(|pair| matches!(pair, [one, other] if one != other));
        let what = format!("{CONCURRENT} episodes at the same time");
        if let Some(example) = wrong.first() {
            let fix = "a job asks about up to max_concurrency (32) episodes at the same time: answer them all, or 429 with Retry-After";
            let detail = format!("{what}: {} not answered; for example: {example}", wrong.len());
            self.find("concurrency", Outcome::Failed, detail, fix);
        } else if differs {
            let fix = "give each episode a state of its own, and draw from a generator with episode.seed, not from a shared one";
            let detail = format!("{what}, all with the same seed, row and message, got different answers");
            self.find("concurrency", Outcome::Warning, detail, fix);
        } else {
            self.find("concurrency", Outcome::Ok, format!("{what}, all answered in the same way"), "");
        }
    }

    /// Asks about an episode that never began.
    pub(super) async fn unknown_episode(&mut self) {
        let mut play = self.new_play();
        play.turn = 2;
        let question = self.step_question(&play, plain(PLAIN), false);
        let what = "a turn of an episode that never began";
        let fix = "answer 404 for an episode that is not known: rlood then begins it again and counts that; anything else loses its reward, or pays for another episode's state";
        match self.send(&question, Signing::Right).await {
            Ok(got) if matches!(got.status, 404 | 410) => {
                self.find("unknown_episode", Outcome::Ok, format!("{what} is {}", got.status), "");
            }
            Ok(got) => {
                let detail = format!("{what} was answered {}{}", got.status, got.excerpt());
                self.find("unknown_episode", Outcome::Failed, detail, fix);
            }
            Err(why) => self.find("unknown_episode", Outcome::Failed, format!("{what}: {why}"), fix),
        }
    }

    /// Closes an episode, twice.
    pub(super) async fn close(&mut self) {
        let fix = "answer env.close.request with any 2xx, also for an episode that is not known";
        let (play, _) = match self.begin().await {
            Ok(begun) => begun,
            Err(why) => return self.find("close", Outcome::Failed, why, ""),
        };
        let question = self.question(&play, Ask::Close(CLOSED));
        for what in ["closing an episode", "closing it again"] {
            match self.send(&question, Signing::Right).await {
                Ok(got) if got.is_success() => {}
                Ok(got) => {
                    let detail = format!("{what} was answered {}{}", got.status, got.excerpt());
                    return self.find("close", Outcome::Warning, detail, fix);
                }
                Err(why) => return self.find("close", Outcome::Warning, format!("{what}: {why}"), fix),
            }
        }
        self.find("close", Outcome::Ok, "episodes can be closed", "");
    }

    /// Whether two answers are the same but for the id of their request.
    pub(super) fn same(one: &[u8], other: &[u8]) -> bool {
        let read = |body: &[u8]| -> Option<Value> {
            let mut value: Value = serde_json::from_slice(body).ok()?;
            value.as_object_mut()?.shift_remove("id");
            Some(value)
        };
        read(one).is_some_and(|one| Some(one) == read(other))
    }
}
