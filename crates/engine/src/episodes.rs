//! Plays the episodes of a rollout: the model and the job's environment take turns.
//!
//! All episodes take turn k together, then the environment answers all of them, then follows turn k + 1. So a rollout is a function
//! of the weights, the keys and the environment's answers: after an interruption the host finds the answers in its journal, and the
//! same tokens are sampled again. Tokens are only appended. What the environment says is context: it has no score and no gradient.
//!
//! Longer than 500 lines: the rules of an episode are read together.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use rlood_chat::{Outcome, ParseContext, ToolParser, Tools, TurnRenderer, tool_calls_value};
use serde_json::{Value, json};

use super::error::EngineError;
use super::generate::{GeneratePrompt, Generated};
use super::host::RunEnd;
use super::prompts::TokenizedPrompt;
use super::random::Key;
use super::text::Text;
use crate::environment::{
    Ask, Episode, EpisodeCall, EpisodeId, EpisodeLimits, EpisodeStop, EpisodeTurn, Reply, Reset, ResetAnswer, Step,
    StepAnswer,
};
use crate::event::{Event, FinishReason};
use crate::spec::{EnvironmentPlan, EpisodeReturn, OnParseError, SamplingPlan};
use rlood_types::rollout::{SampledGroup, Segment, Segments};

/// Smallest number of tokens for an observation: an episode with less room than this and a turn has no further turn.
const MIN_OBSERVATION_TOKENS: usize = 16;

/// An episode that is being played.
struct Player {
    id: EpisodeId,
    /// Token ids of the prompt: the row's messages, those of the environment, and the tools.
    prompt: Vec<u32>,
    /// Number of them that all episodes of the group begin with; 0 before that is known.
    num_shared: usize,
    /// Maximum number of tokens after the prompt: those that the job allows and the model can read.
    max_tokens: usize,
    segments: Vec<Segment>,
    tools: Tools,
    session: Option<String>,
    record: Episode,
    /// Number of turns in a row with calls that are not valid.
    errors_in_a_row: u32,
    /// The next need of the episode.
    state: State,
}

enum State {
    /// The environment must begin it.
    New,
    /// The model takes the next turn.
    Live,
    Over,
}

/// A turn that the model has just taken.
struct Taken {
    /// Token ids of the turn.
    ids: Vec<u32>,
    /// Ids of its calls, in order.
    calls: Vec<String>,
    /// Why the episode ends with it, whatever the environment answers.
    ends: Option<EpisodeStop>,
    /// The message about calls that are not valid, in place of an answer of the environment.
    own_reply: Option<Value>,
    ask: Step,
}

impl Player {
    fn new(row: u64, index: u32) -> Self {
        let record = Episode {
            turns: Vec::new(),
            total: None,
            stop: EpisodeStop::Failed,
            restarts: 0,
            special_tokens_escaped: 0,
            opening: Vec::new(),
            num_tools: 0,
        };
        Self {
            id: EpisodeId { row, index, attempt: 0 },
            prompt: Vec::new(),
            num_shared: 0,
            max_tokens: 0,
            segments: Vec::new(),
            tools: Tools::default(),
            session: None,
            record,
            errors_in_a_row: 0,
            state: State::New,
        }
    }

    fn num_tokens(&self) -> usize {
        self.segments.iter().map(|segment| segment.ids().len()).sum()
    }

    /// The part of the prompt that all episodes of the group share. Training computes it once.
    fn shared(&self) -> &[u32] {
        &self.prompt[..self.num_shared.min(self.prompt.len())]
    }

    /// All tokens after that.
    fn given(&self) -> Vec<u32> {
        let segments = self.segments.iter().flat_map(Segment::ids);
        self.prompt[self.num_shared..].iter().chain(segments).copied().collect()
    }

    fn end(&mut self, stop: EpisodeStop) {
        self.record.stop = stop;
        self.state = State::Over;
    }

    /// Begins again after the server has forgotten the episode, unless that has happened too often.
    fn restart(&mut self, most: u32) {
        if self.id.attempt >= most {
            return self.fail();
        }
        let mut again = Self::new(self.id.row, self.id.index);
        again.id.attempt = self.id.attempt + 1;
        again.record.restarts = again.id.attempt;
        (again.prompt, again.num_shared) = (std::mem::take(&mut self.prompt), self.num_shared);
        *self = again;
    }

    /// Ends the episode without a reward.
    fn fail(&mut self) {
        self.record.turns.iter_mut().for_each(|turn| turn.reward = None);
        self.end(EpisodeStop::Failed);
    }
}

/// The services that the episodes need: those of a run, or of a test of the environment.
pub trait Table {
    /// Samples one completion for each prompt, each of at most `max_tokens` tokens.
    ///
    /// # Errors
    /// Fails if the run ends or sampling fails.
    fn generate(&mut self, prompts: &[GeneratePrompt<'_>], max_tokens: usize) -> Result<Vec<Generated>, RunEnd>;

    /// Asks the environment. Returns one reply for each call.
    ///
    /// # Errors
    /// Fails if the run ends or the environment stays away.
    fn ask(&mut self, calls: &[EpisodeCall]) -> Result<Vec<Reply>, RunEnd>;

    /// Reports an event to the host.
    ///
    /// # Errors
    /// Fails if the run ends.
    fn event(&mut self, event: Event) -> Result<(), RunEnd>;
}

/// The episodes of one rollout.
#[derive(Debug)]
pub struct Episodes<'a> {
    /// The sampling settings of the job.
    pub sampling: &'a SamplingPlan,
    /// The environment of the job.
    pub environment: &'a EnvironmentPlan,
    /// The tokenizer and the chat template of the model.
    pub text: &'a Text,
    /// The prompts by dataset row.
    pub prompts: &'a [TokenizedPrompt],
    /// Number of episodes for each row.
    pub num_generations: NonZeroUsize,
    /// The root key of the completions, and that of the environment's seeds.
    pub keys: (Key, Key),
    /// Number of tokens that the model can read.
    pub max_positions: usize,
}

/// Plays all episodes of a rollout: `num_generations` for each of these rows.
///
/// # Errors
/// Fails if the table fails, or if the model's chat template cannot render a turn.
pub fn play(table: &mut dyn Table, episodes: &Episodes<'_>, rows: &[u64]) -> Result<Vec<SampledGroup>, RunEnd> {
    let Episodes { sampling, environment, text, num_generations, .. } = *episodes;
    let renderer = TurnRenderer::new(text, &sampling.chat_template_kwargs);
    let renderer = renderer.map_err(|error| EngineError::Prompts(error.to_string()))?;
    let parser = ToolParser::named(&environment.tool_parser)
        .unwrap_or_else(|| ToolParser::by_template(text.chat_template().unwrap_or_default()).parser);
    let game = Game {
        episodes,
        environment,
        parser,
        opens_reasoning: renderer.opens_reasoning(),
        renderer,
        turn_tokens: sampling.max_completion_length as usize,
    };
    let of_row = |&row: &u64| (0..num_generations.get() as u32).map(move |index| Player::new(row, index));
    let mut players: Vec<Player> = rows.iter().flat_map(of_row).collect();
    for open in players.chunks_mut(num_open(environment.max_open_episodes, num_generations.get())) {
        if open.len() < num_generations.get() {
            // The others of the group begin later, so their common beginning is not known yet.
            open.iter_mut().for_each(|player| player.num_shared = 1);
        }
        game.play_open(table, open)?;
    }
    let mut players = players.into_iter();
    let groups = rows.iter().map(|&row| game.group(row, players.by_ref().take(num_generations.get()).collect()));
    Ok(groups.collect())
}

/// Number of episodes that are open at a time: whole groups, if one fits.
fn num_open(most: Option<u32>, num_generations: usize) -> usize {
    match most.map(|most| most as usize) {
        None => usize::MAX,
        Some(most) if most >= num_generations => most - most % num_generations,
        Some(most) => most.max(1),
    }
}

/// The rules of the episodes.
struct Game<'a> {
    episodes: &'a Episodes<'a>,
    environment: &'a EnvironmentPlan,
    parser: ToolParser,
    opens_reasoning: bool,
    renderer: TurnRenderer<'a>,
    /// Maximum number of tokens of a turn.
    turn_tokens: usize,
}

impl Game<'_> {
    /// Plays episodes that are open at the same time, and closes them.
    fn play_open(&self, table: &mut dyn Table, players: &mut [Player]) -> Result<(), RunEnd> {
        while players.iter().any(|player| !matches!(player.state, State::Over)) {
            self.begin(table, players)?;
            for group in players.chunks_mut(self.episodes.num_generations.get()) {
                if find_shared(group) {
                    report_different_openings(table, group)?;
                }
            }
            let taken = self.take_turns(table, players)?;
            self.answer(table, players, taken)?;
        }
        let close = |player: &Player| EpisodeCall { episode: player.id.clone(), ask: Ask::Close(player.record.stop) };
        table.ask(&players.iter().map(close).collect::<Vec<_>>())?;
        Ok(())
    }

    /// Begins the episodes that have not begun.
    fn begin(&self, table: &mut dyn Table, players: &mut [Player]) -> Result<(), RunEnd> {
        loop {
            let new: Vec<usize> =
                (0..players.len()).filter(|&place| matches!(players[place].state, State::New)).collect();
            if new.is_empty() {
                return Ok(());
            }
            let calls: Vec<EpisodeCall> = new.iter().map(|&place| self.reset_call(&players[place].id)).collect();
            let replies = ask(table, &calls)?;
            for (&place, (call, reply)) in new.iter().zip(calls.iter().zip(replies)) {
                let player = &mut players[place];
                let Ask::Reset(reset) = &call.ask else { continue };
                match reply {
                    Reply::Reset(answer) => {
                        if let Err(why) = self.open(player, &reset.messages, answer) {
                            report_invalid(table, &call.episode, &why)?;
                            player.fail();
                        }
                    }
                    Reply::Lost => player.restart(self.environment.max_restarts),
                    Reply::Step(_) | Reply::Closed | Reply::Failed { .. } => player.fail(),
                }
            }
        }
    }

    fn reset_call(&self, episode: &EpisodeId) -> EpisodeCall {
        let prompt = &self.episodes.prompts[episode.row as usize];
        let messages = match &prompt.messages {
            Some(Value::Array(messages)) => messages.clone(),
            _ => vec![json!({"role": "user", "content": prompt.text})],
        };
        // The same for all episodes of the group, whatever their order.
        let seed = self.episodes.keys.1.with(episode.row).bits() >> 11;
        let limits =
            EpisodeLimits { max_turns: self.environment.max_turns, max_tokens: self.environment.max_episode_tokens };
        let reset = Reset { seed, messages, columns: prompt.columns.clone(), limits };
        EpisodeCall { episode: episode.clone(), ask: Ask::Reset(Box::new(reset)) }
    }

    /// Renders the prompt of an episode that the environment has begun. Fails with the reason.
    fn open(&self, player: &mut Player, messages: &[Value], answer: ResetAnswer) -> Result<(), String> {
        answer.check_messages()?;
        let ResetAnswer { session, messages: opening, tools } = answer;
        let tools = Tools::new(&tools).map_err(|error| format!("tools{}: {error}", error.pointer))?;
        let all = [messages, opening.as_slice()].concat();
        let first = self.renderer.first(&all, messages.len(), &tools).map_err(|error| error.to_string())?;
        if first.ids.is_empty() {
            return Err("the prompt of the episode is empty".to_owned());
        }
        let (num_tokens, most) = (first.ids.len(), self.episodes.max_positions);
        player.max_tokens = (self.environment.max_episode_tokens as usize).min(most.saturating_sub(num_tokens));
        if player.max_tokens < self.turn_tokens {
            return Err(format!(
                "the prompt of the episode has {num_tokens} tokens with the environment's messages and tools, the model reads {most}, and a \
                 turn may have {} (sampling.max_completion_length): shorten the messages, or lower the limit",
                self.turn_tokens
            ));
        }
        if !first.ids.starts_with(player.shared()) {
            return Err(
                "the episode began again with other messages or tools, but seed and row are the same".to_owned()
            );
        }
        player.record.special_tokens_escaped += count(first.special_tokens_escaped);
        (player.record.opening, player.record.num_tools) = (opening, count(tools.schemas().len()));
        (player.prompt, player.tools, player.session) = (first.ids, tools, session);
        player.state = State::Live;
        Ok(())
    }

    /// Samples the next turn of all episodes that are not over. Returns each with its place.
    fn take_turns(&self, table: &mut dyn Table, players: &mut [Player]) -> Result<Vec<(usize, Taken)>, RunEnd> {
        let live: Vec<usize> =
            (0..players.len()).filter(|&place| matches!(players[place].state, State::Live)).collect();
        if live.is_empty() {
            return Ok(Vec::new());
        }
        let given: Vec<Vec<u32>> = live.iter().map(|&place| players[place].given()).collect();
        let prompt = |(&place, given): (&usize, &Vec<u32>)| {
            let player = &players[place];
            let EpisodeId { row, index, attempt } = player.id;
            let turn = player.record.turns.len() as u64;
            let word = self.episodes.keys.0.with(row).with(index.into()).with(attempt.into()).with(turn).word();
            (word, player.shared().to_vec(), given.clone())
        };
        let prompts: Vec<(u64, Vec<u32>, Vec<u32>)> = live.iter().zip(&given).map(prompt).collect();
        let prompts: Vec<GeneratePrompt<'_>> =
            prompts.iter().map(|(row, ids, given)| GeneratePrompt { row: *row, ids, given }).collect();
        let sampled = table.generate(&prompts, self.turn_tokens)?;
        let mut taken = Vec::with_capacity(live.len());
        for (place, generated) in live.into_iter().zip(sampled) {
            taken.push((place, self.take(&mut players[place], generated)?));
        }
        Ok(taken)
    }

    /// Adds a sampled turn to its episode, and finds out what to ask the environment.
    fn take(&self, player: &mut Player, generated: Generated) -> Result<Taken, EngineError> {
        let Generated { segments: Segments(segments), finish_reason, .. } = generated;
        let ids: Vec<u32> = segments.iter().flat_map(Segment::ids).copied().collect();
        player.segments.extend(segments);
        let number = player.record.turns.len();
        let text = match finish_reason {
            FinishReason::Stop => {
                self.renderer.turn_text(&ids).map_err(|error| EngineError::Prompts(error.to_string()))?
            }
            FinishReason::Length => self.episodes.text.decode(&ids, false)?,
        };
        let context = ParseContext { tools: &player.tools, turn: number, opens_reasoning: self.opens_reasoning };
        let turn = self.parser.parse(&text, &context);
        let mut message = json!({"role": "assistant", "content": turn.content});
        if let Some(reasoning) = &turn.reasoning_content {
            message["reasoning_content"] = json!(reasoning);
        }
        let (mut calls, mut invalid) = (Vec::new(), None);
        match turn.outcome {
            Outcome::Answer => {}
            // A turn that was cut may have cut its last call too, so none of its calls is carried out.
            _ if finish_reason == FinishReason::Length => message["content"] = json!(text),
            Outcome::Calls(found) => {
                message["tool_calls"] = tool_calls_value(&found);
                calls.extend(found.into_iter().map(|call| call.id));
            }
            Outcome::Invalid(error) => {
                message["content"] = json!(text);
                invalid = Some(error);
            }
        }
        player.errors_in_a_row = if invalid.is_some() { player.errors_in_a_row + 1 } else { 0 };
        let turns_left = (self.environment.max_turns as usize).saturating_sub(number + 1);
        let tokens_left = player.max_tokens.saturating_sub(player.num_tokens());
        let has_room = tokens_left >= self.turn_tokens + MIN_OBSERVATION_TOKENS;
        let gives_up = invalid.is_some()
            && (self.environment.on_parse_error == OnParseError::End
                || player.errors_in_a_row >= self.environment.max_parse_errors);
        let ends = match () {
            () if finish_reason == FinishReason::Length => Some(EpisodeStop::Length),
            () if gives_up => Some(EpisodeStop::ParseError),
            () if turns_left == 0 => Some(EpisodeStop::MaxTurns),
            () if !has_room => Some(EpisodeStop::MaxTokens),
            () => None,
        };
        player.record.turns.push(EpisodeTurn {
            text: text.clone(),
            num_tokens: count(ids.len()),
            tool_calls: message["tool_calls"].as_array().cloned().unwrap_or_default(),
            parse_error: invalid.as_ref().map(|error| error.kind.name().to_owned()),
            observations: Vec::new(),
            observation_tokens: 0,
            observations_cut: 0,
            reward: None,
            metrics: BTreeMap::new(),
            latency_ms: None,
        });
        let own_reply = invalid.filter(|_| ends.is_none()).map(|error| match self.renderer.tool_role() {
            Ok(_) => error.reply(&self.parser.call_id(number, 0)),
            Err(_) => json!({"role": "user", "content": error.message}),
        });
        let ask = Step {
            turn: count(number),
            session: player.session.clone(),
            message,
            text,
            finish_reason,
            num_tokens: count(ids.len()),
            turns_left: count(turns_left),
            tokens_left: count(tokens_left),
            is_final: ends.is_some(),
        };
        Ok(Taken { ids, calls, ends, own_reply, ask })
    }

    /// Asks the environment for the answers to these turns, and adds them to the episodes.
    fn answer(&self, table: &mut dyn Table, players: &mut [Player], taken: Vec<(usize, Taken)>) -> Result<(), RunEnd> {
        let (own, asked): (Vec<_>, Vec<_>) = taken.into_iter().partition(|(_, taken)| taken.own_reply.is_some());
        for (place, taken) in own {
            let messages: Vec<Value> = taken.own_reply.iter().cloned().collect();
            self.append(&mut players[place], &taken.ids, messages);
        }
        let call = |(place, taken): &(usize, Taken)| EpisodeCall {
            episode: players[*place].id.clone(),
            ask: Ask::Step(Box::new(taken.ask.clone())),
        };
        let calls: Vec<EpisodeCall> = asked.iter().map(call).collect();
        let replies = ask(table, &calls)?;
        for ((place, taken), (call, reply)) in asked.into_iter().zip(calls.iter().zip(replies)) {
            let player = &mut players[place];
            match reply {
                Reply::Step(answer) => {
                    if let Err(why) = self.apply(player, &taken, answer) {
                        report_invalid(table, &call.episode, &why)?;
                        player.fail();
                    }
                }
                Reply::Lost => player.restart(self.environment.max_restarts),
                Reply::Reset(_) | Reply::Closed | Reply::Failed { .. } => player.fail(),
            }
        }
        Ok(())
    }

    /// Applies an environment's answer to a turn. Fails with the reason if it is not valid.
    fn apply(&self, player: &mut Player, taken: &Taken, answer: StepAnswer) -> Result<(), String> {
        answer.check_metrics()?;
        let checked = answer.check_messages(&taken.calls);
        let StepAnswer { messages, reward, done, metrics, session, latency_ms } = answer;
        if reward.is_some_and(|reward| !reward.is_finite()) {
            return Err("a reward must be a finite number or null".to_owned());
        }
        player.session = session.or_else(|| player.session.take());
        if let Some(turn) = player.record.turns.last_mut() {
            (turn.reward, turn.metrics, turn.latency_ms) = (reward, metrics, latency_ms);
        }
        if done || taken.ends.is_some() {
            player.end(if done { EpisodeStop::EnvDone } else { taken.ends.unwrap_or(EpisodeStop::EnvDone) });
            return Ok(());
        }
        checked?;
        if messages.is_empty() {
            player.end(EpisodeStop::NoCall);
            return Ok(());
        }
        self.append(player, &taken.ids, messages);
        Ok(())
    }

    /// Appends messages to an episode, or ends it if there is no room for them and another turn.
    fn append(&self, player: &mut Player, sampled: &[u32], messages: Vec<Value>) {
        let used = player.num_tokens();
        let room = player.max_tokens.saturating_sub(used + self.turn_tokens);
        let most = room.min(self.environment.max_observation_tokens as usize);
        let suffix = match self.renderer.next(sampled, &messages, most) {
            Ok(suffix) => suffix,
            // The template cannot show these messages. The environment's author must know, so the episode has no reward.
            Err(_) => return player.fail(),
        };
        if let Some(turn) = player.record.turns.last_mut() {
            turn.observations = messages;
            turn.observation_tokens = count(suffix.ids.len());
            turn.observations_cut = count(suffix.observations_cut);
        }
        player.record.special_tokens_escaped += count(suffix.special_tokens_escaped);
        if suffix.ids.len() > room {
            return player.end(EpisodeStop::MaxTokens);
        }
        player.segments.push(Segment::Context { ids: suffix.ids });
    }

    /// Makes a group of its episodes. Their common beginning is the prompt; what differs after it is context.
    fn group(&self, row: u64, players: Vec<Player>) -> SampledGroup {
        let default = &self.episodes.prompts[row as usize].ids;
        let first = players.iter().find(|player| !player.segments.is_empty());
        let prompt = first.map_or(default.clone(), |player| player.shared().to_vec());
        let end = self.episodes.text.eos_token_ids().first().copied().unwrap_or(0);
        let completions = players.into_iter().map(|mut player| {
            let mut segments = Vec::new();
            if player.segments.is_empty() {
                // It never began, so it has no reward and trains nothing; every completion has a token.
                segments.push(Segment::Model { ids: vec![end], logps: None });
            } else if player.prompt.len() > prompt.len() {
                segments.push(Segment::Context { ids: player.prompt[prompt.len()..].to_vec() });
            }
            segments.append(&mut player.segments);
            let finish_reason = if player.record.stop.is_limit() { FinishReason::Length } else { FinishReason::Stop };
            player.record.total = total(self.environment.total, &player.record);
            Generated { segments: Segments(segments), finish_reason, episode: Some(Box::new(player.record)) }
        });
        SampledGroup { row, completions: completions.collect(), prompt_ids: Some(prompt) }
    }
}

/// Finds the common beginning of the prompts of a group, once all that can have one have begun. An environment should begin all episodes
/// of a group in the same way: returns whether it did not.
fn find_shared(group: &mut [Player]) -> bool {
    if group.iter().any(|player| player.num_shared > 0) {
        return false;
    }
    let prompts: Vec<&[u32]> =
        group.iter().map(|player| player.prompt.as_slice()).filter(|prompt| !prompt.is_empty()).collect();
    let Some((first, others)) = prompts.split_first() else { return false };
    let common = |length: usize, other: &&[u32]| first[..length].iter().zip(*other).take_while(|(a, b)| a == b).count();
    let length = others.iter().fold(first.len(), common).max(1);
    let differ = others.iter().any(|other| other != first);
    group.iter_mut().for_each(|player| player.num_shared = length.min(player.prompt.len()));
    differ
}

/// Reports that the environment began the episodes of a group differently, with the first two openings that differ.
fn report_different_openings(table: &mut dyn Table, group: &[Player]) -> Result<(), RunEnd> {
    let mut begun = group.iter().filter(|player| !player.prompt.is_empty());
    let Some(first) = begun.next() else { return Ok(()) };
    let Some(other) = begun.find(|player| player.prompt != first.prompt) else { return Ok(()) };
    let row = first.id.row;
    let message = format!(
        "the environment began the episodes of row {row} in different ways, although they have the same seed: their rewards do not compare. Use episode.seed for everything random in a reset"
    );
    let opening = |player: &Player| json!({"index": player.id.index, "messages": player.record.opening, "tools": player.tools.names().collect::<Vec<_>>()});
    let data = json!({"row": row, "openings": [opening(first), opening(other)]});
    table.event(Event::Warning { code: "environment_reset_differs".to_owned(), message, data })
}

/// Asks the environment. There is one reply for each call.
fn ask(table: &mut dyn Table, calls: &[EpisodeCall]) -> Result<Vec<Reply>, RunEnd> {
    if calls.is_empty() {
        return Ok(Vec::new());
    }
    let replies = table.ask(calls)?;
    if replies.len() != calls.len() {
        let message = format!("the host gave {} replies to {} calls of the environment", replies.len(), calls.len());
        return Err(RunEnd::Failed(EngineError::Input(message)));
    }
    Ok(replies)
}

/// Returns the reward of an episode; `None` if no turn had one.
fn total(rule: EpisodeReturn, record: &Episode) -> Option<f64> {
    let rewards = || record.turns.iter().filter_map(|turn| turn.reward);
    match rule {
        EpisodeReturn::Sum => rewards().reduce(|sum, reward| sum + reward),
        EpisodeReturn::Last => rewards().next_back(),
    }
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Reports an answer that is not valid.
fn report_invalid(table: &mut dyn Table, episode: &EpisodeId, why: &str) -> Result<(), RunEnd> {
    let message = format!("an answer of the environment for row {} is not valid: {why}", episode.row);
    let data = json!({"row": episode.row, "index": episode.index});
    table.event(Event::Warning { code: "environment_answer".to_owned(), message, data })
}
