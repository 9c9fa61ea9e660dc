//! The OpenAI API (`/v1`) and vLLM's tokenizer routes, for the models and checkpoints of this server.
//!
//! A request passes: its fields (`fields`), the model (`names`), the prompt's tokens, the serving process
//! ([`crate::supervisor::serving`]), and the answer's form (`chat`, `completions`).

mod answer;
mod chat;
mod completions;
mod error;
mod fields;
mod measures;
mod models;
mod names;
mod tokenizer;
mod tokens;
mod tools;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::error::Problem;
use crate::modelcard::ModelCard;
use crate::modelcard::text::Text;
use crate::store::ModelRow;
use crate::store::background::spawn_blocking;

pub(super) use answer::{Collected, Whole, collect, problem, start};
pub(super) use error::{is_openai, translated};
pub(super) use measures::write as write_metrics;
pub use names::Chosen;
pub(super) use names::resolve;

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(models::list_served_models))
        .routes(routes!(models::get_served_model))
        .routes(routes!(models::get_served_model_of))
        .routes(routes!(chat::create_chat_completion))
        .routes(routes!(completions::create_completion))
        .routes(routes!(tokenizer::tokenize))
        .routes(routes!(tokenizer::detokenize))
        .routes(routes!(tokenizer::tokenizer_info))
        .routes(routes!(completions::create_completion_of))
        .routes(routes!(chat::create_chat_completion_of))
        .routes(routes!(tokenizer::tokenize_of))
        .routes(routes!(tokenizer::detokenize_of))
        .routes(routes!(tokenizer::tokenizer_info_of))
}

/// Number of models whose tokenizers are kept.
const MAX_KEPT: usize = 16;
/// Time after which the files of a kept model are compared with their registration again.
const RECHECK: Duration = Duration::from_secs(10);

/// The tokenizers and cards of the models that were served last.
#[derive(Debug, Clone, Default)]
pub struct Texts(Arc<Mutex<VecDeque<Kept>>>);

#[derive(Debug, Clone)]
struct Kept {
    dir: PathBuf,
    sha256: String,
    facts: Arc<Facts>,
    checked: Instant,
}

/// The tokenizer and the card of a model.
#[derive(Debug)]
pub struct Facts {
    /// The tokenizer with its chat template.
    pub text: Text,
    /// The metadata of the model.
    pub card: ModelCard,
}

impl Texts {
    /// Returns the tokenizer and card of a model whose files are as registered with this hash.
    ///
    /// # Errors
    /// Fails if the files have changed or cannot be read.
    pub(super) async fn of(&self, row: ModelRow, sha256: String) -> Result<Arc<Facts>, Problem> {
        let dir = PathBuf::from(&row.source);
        let kept = self.find(&dir, &sha256);
        if let Some(kept) = kept.as_ref().filter(|kept| kept.checked.elapsed() < RECHECK) {
            return Ok(kept.facts.clone());
        }
        super::job_models::unchanged(row, sha256.clone()).await?;
        let facts = match kept {
            Some(kept) => kept.facts,
            None => {
                let of = dir.clone();
                let read = move || {
                    let card = crate::modelcard::read(&of).map_err(|error| error.to_string())?;
                    let text = Text::load(&of).map_err(|error| error.to_string())?;
                    Ok::<_, String>(Arc::new(Facts { text, card }))
                };
                let read = spawn_blocking(read).await.map_err(Problem::internal)?;
                read.map_err(|why| Problem::new(super::error::Code::InvalidModel, why))?
            }
        };
        self.keep(Kept { dir, sha256, facts: facts.clone(), checked: Instant::now() });
        Ok(facts)
    }

    fn find(&self, dir: &std::path::Path, sha256: &str) -> Option<Kept> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().find(|kept| kept.dir == *dir && kept.sha256 == sha256).cloned()
    }

    fn keep(&self, new: Kept) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|kept| kept.dir != new.dir || kept.sha256 != new.sha256);
        kept.push_back(new);
        if kept.len() > MAX_KEPT {
            kept.pop_front();
        }
    }
}
