//! A tool behind one address, in the form of OpenAI's and Azure's agent fine-tuning: a `function_call` is answered by a
//! `function_call_output`.

use reqwest::Response;
use serde_json::{Value, json};

use super::endpoint::{Endpoint, MAX_BYTES, Trouble, trouble_of};
use super::{Call, answer_text};
use crate::spec::HttpToolPlan;

/// Returns the schema of the tool in the form of OpenAI's API.
pub(super) fn schema(plan: &HttpToolPlan) -> Value {
    let HttpToolPlan { name, server_url: _, description, parameters } = plan;
    json!({"type": "function", "function": {"name": name, "description": description, "parameters": parameters}})
}

/// Returns the body of a call.
pub(super) fn body(call: &Call<'_>) -> String {
    let Call { id, name, arguments, trace, item } = call;
    json!({
        "type": "function_call", "id": format!("fc_{id}"), "call_id": id, "name": name, "arguments": arguments,
        "trace_id": trace, "item": item,
    })
    .to_string()
}

/// Calls the tool once. Returns the text for the model, which may say why the service refused the call.
pub(super) async fn call(endpoint: &Endpoint, call: &Call<'_>) -> Result<String, Trouble> {
    let body = body(call);
    if body.len() > MAX_BYTES {
        return Ok(format!("error 413: the call has more than {MAX_BYTES} bytes"));
    }
    let id = call.id;
    endpoint
        .post((id, &body), &[("rlood-episode", call.trace)], async |endpoint, response| {
            read(endpoint, response, id).await
        })
        .await
}

async fn read(endpoint: &Endpoint, response: Response, id: &str) -> Result<String, Trouble> {
    let status = response.status();
    if let Some(trouble) = trouble_of(status, response.headers()) {
        return Err(trouble);
    }
    let Some(body) = endpoint.body(response).await? else {
        return Ok(format!("error 413: the answer of the tool has more than {MAX_BYTES} bytes"));
    };
    if status.is_client_error() {
        let said = String::from_utf8_lossy(&body);
        return Ok(format!("error {}: {}", status.as_u16(), said.trim()));
    }
    let invalid = |why: String| Trouble::transient(format!("the answer is not valid: {why}"));
    let answer = crate::strict_json::read(&body).map_err(|error| invalid(error.to_string()))?;
    if answer.get("type").is_some_and(|kind| kind != "function_call_output") {
        return Err(invalid("type must be function_call_output".to_owned()));
    }
    if answer.get("call_id").is_some_and(|given| given != id) {
        return Err(invalid("it has the call_id of another call".to_owned()));
    }
    match answer.get("output") {
        Some(output) => Ok(answer_text(output)),
        None => Err(invalid("output is required".to_owned())),
    }
}
