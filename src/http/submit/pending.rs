//! The document of a job whose datasets are not all downloaded: it names each dataset by the id that it has or will have.

use serde_json::{Value, json};

use super::stored::store_source;
use super::{AppState, Prompts, Source};
use crate::http::error::Problem;
use crate::http::lookup::EvalPrompts;
use crate::id::DatasetId;

/// The dataset of a warm-up, whose mapping is not applied a second time to rows that were stored with it.
const WARM_UP: &str = "/warm_up/dataset";

/// Stores all rows that are here, and replaces each dataset in the document by its id. Returns the ids of the datasets that the job
/// needs. Then the document can be read again once all of them are stored.
pub(super) async fn name_stored(
    state: &AppState,
    owner: &str,
    (train, eval, warm_up): (Option<Prompts>, EvalPrompts, Option<Prompts>),
    document: &mut Value,
) -> Result<Vec<DatasetId>, Problem> {
    let EvalPrompts { eval, test, guard } = eval;
    let mut needed = Vec::new();
    for Prompts { at, source, facts, .. } in [train, eval, test, guard, warm_up].into_iter().flatten() {
        let Source::Several(sources) = source else {
            let name = document.pointer(&at).and_then(|place| Some(place.get("name")?.as_str()?.to_owned()));
            let place = Place { document: &mut *document, at: &at };
            needed.extend(place.name_dataset(state, owner, (name, None), source).await?);
            continue;
        };
        for (index, (source, facts)) in sources.into_iter().zip(&facts.sources).enumerate() {
            let (at, name) = (format!("{at}/{index}"), &facts.plan.name);
            let place = Place { document: &mut *document, at: &at };
            needed.extend(place.name_dataset(state, owner, (None, Some(name)), source).await?);
        }
    }
    Ok(needed)
}

/// A place in the document of a job.
struct Place<'d> {
    document: &'d mut Value,
    /// JSON pointer to a dataset.
    at: &'d str,
}

impl Place<'_> {
    /// Replaces the dataset at this place by its id, and returns the id. `names`: the display name of the dataset, and its name as one
    /// of several sources.
    async fn name_dataset(
        self,
        state: &AppState,
        owner: &str,
        (name, source_name): (Option<String>, Option<&String>),
        source: Source,
    ) -> Result<Option<DatasetId>, Problem> {
        let id = match source {
            Source::Stored(path) => {
                let id = path.file_stem().and_then(|stem| stem.to_str()).and_then(|stem| stem.parse().ok());
                return Ok(id);
            }
            Source::Downloading(id) => {
                // A dataset that the job names by its id may have a mapping of its own, which is applied later.
                if self.document.pointer(self.at).is_none_or(|place| place.get("hub").is_none()) {
                    return Ok(Some(id));
                }
                if let Some(name) = &name {
                    state.store.dataset_download_name(id, name).await?;
                }
                id
            }
            rows => match store_source(state, owner, name, rows).await? {
                Some(row) => row.id,
                None => return Ok(None),
            },
        };
        if let Some(place) = self.document.pointer_mut(self.at) {
            let weight = place.get("weight").cloned();
            *place = json!({"id": id});
            if let Some(name) = source_name {
                place["name"] = json!(name);
            }
            if let Some(weight) = weight {
                place["weight"] = weight;
            }
        }
        if self.at == WARM_UP
            && let Some(warm_up) = self.document.get_mut("warm_up").and_then(Value::as_object_mut)
        {
            warm_up.shift_remove("map");
        }
        Ok(Some(id))
    }
}
