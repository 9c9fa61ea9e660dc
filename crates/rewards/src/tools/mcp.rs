//! Client of an MCP server over streamable HTTP (version 2025-06-18). All calls of an attempt share one session; when the server has
//! forgotten it, the next call opens another one.

use std::sync::Arc;

use reqwest::Response;
use reqwest::header::{CONTENT_TYPE, HeaderMap};
use serde_json::{Value, json};
use tokio::sync::Mutex;

use super::endpoint::{Endpoint, MAX_BYTES, Trouble, trouble_of};
use super::{Call, content_text};

/// The version that the client asks for. A server may answer with another one, which is then used.
const VERSION: &str = "2025-06-18";
/// Maximum number of pages of a list of tools.
const MAX_PAGES: usize = 64;
/// JSON-RPC's code for an error inside the server.
const INTERNAL_ERROR: i64 = -32603;

/// An MCP server with its session.
pub(super) struct McpServer {
    pub endpoint: Endpoint,
    pub allow: Vec<String>,
    session: Mutex<Option<Arc<Session>>>,
}

/// A session that the server has opened.
struct Session {
    /// Id of the session; `None` for servers without sessions.
    id: Option<String>,
    version: String,
}

impl Session {
    fn headers(&self) -> Vec<(&'static str, &str)> {
        let id = self.id.as_deref().map(|id| ("mcp-session-id", id));
        [("accept", ACCEPTED), ("mcp-protocol-version", self.version.as_str())].into_iter().chain(id).collect()
    }
}

const ACCEPTED: &str = "application/json, text/event-stream";

/// A JSON-RPC answer of the server.
enum Answer {
    Result(Value),
    Error { code: i64, message: String },
    TooLarge,
}

impl McpServer {
    pub fn new(endpoint: Endpoint, allow: Vec<String>) -> Self {
        Self { endpoint, allow, session: Mutex::default() }
    }

    /// Returns the schemas of the allowed tools in the form of OpenAI's API, in the order in which they are allowed.
    pub async fn tools(&self, id: &str) -> Result<Vec<Value>, Trouble> {
        let (mut listed, mut cursor) = (Vec::new(), Value::Null);
        for page in 0..MAX_PAGES {
            let params = if cursor.is_null() { json!({}) } else { json!({"cursor": cursor}) };
            let result = match self.request(&format!("{id}_{page}"), "tools/list", params).await? {
                Answer::Result(result) => result,
                Answer::Error { code: INTERNAL_ERROR, message } => return Err(Trouble::transient(message)),
                Answer::Error { code, message } => {
                    return Err(Trouble::Permanent(format!("tools/list failed with {code}: {message}")));
                }
                Answer::TooLarge => {
                    return Err(Trouble::Permanent("the list of tools is larger than 1 MiB".to_owned()));
                }
            };
            let Some(tools) = result["tools"].as_array() else {
                return Err(Trouble::transient("the answer to tools/list has no list 'tools'"));
            };
            listed.extend(tools.iter().cloned());
            cursor = result["nextCursor"].clone();
            if !cursor.is_string() {
                break;
            }
        }
        self.allow.iter().map(|name| self.schema(name, &listed)).collect()
    }

    fn schema(&self, name: &str, listed: &[Value]) -> Result<Value, Trouble> {
        let Some(tool) = listed.iter().find(|tool| tool["name"] == name) else {
            let known: Vec<&str> = listed.iter().take(20).filter_map(|tool| tool["name"].as_str()).collect();
            return Err(Trouble::Permanent(format!(
                "the MCP server has no tool '{name}' (it has: {}): correct 'allow', or the server",
                known.join(", ")
            )));
        };
        let mut function = json!({"name": name});
        if let Some(text) = tool["description"].as_str() {
            function["description"] = json!(text);
        }
        if tool["inputSchema"].is_object() {
            function["parameters"] = tool["inputSchema"].clone();
        }
        Ok(json!({"type": "function", "function": function}))
    }

    /// Calls a tool once. Returns the text for the model, which may be that of an error.
    pub async fn call(&self, call: &Call<'_>) -> Result<String, Trouble> {
        let arguments: Value = serde_json::from_str(call.arguments).unwrap_or_else(|_| json!({}));
        if call.arguments.len() > MAX_BYTES {
            return Ok(format!("error: the call has more than {MAX_BYTES} bytes"));
        }
        match self.request(call.id, "tools/call", json!({"name": call.name, "arguments": arguments})).await? {
            Answer::Result(result) => Ok(content_text(&result)),
            Answer::Error { code: INTERNAL_ERROR, message } => Err(Trouble::transient(message)),
            Answer::Error { message, .. } => Ok(format!("error: {message}")),
            Answer::TooLarge => Ok(format!("error: the answer of the tool has more than {MAX_BYTES} bytes")),
        }
    }

    /// Ends the session, if there is one.
    pub async fn close(&self) {
        let session = self.session.lock().await.take();
        if let Some(session) = session.filter(|session| session.id.is_some()) {
            self.endpoint.delete(&session.headers()).await;
        }
    }

    /// Sends a request in the current session, or in a new one if the server has forgotten it.
    async fn request(&self, id: &str, method: &str, params: Value) -> Result<Answer, Trouble> {
        let body = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).to_string();
        let session = self.open().await?;
        match self.post(id, &body, &session.headers()).await {
            Err(Trouble::SessionGone) => {}
            other => return other.map(|(answer, _)| answer),
        }
        let mut current = self.session.lock().await;
        if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, &session)) {
            *current = None;
        }
        drop(current);
        let session = self.open().await?;
        match self.post(id, &body, &session.headers()).await {
            Err(Trouble::SessionGone) => {
                Err(Trouble::transient("the MCP server does not know the session that it opened"))
            }
            other => other.map(|(answer, _)| answer),
        }
    }

    /// Returns the session, which is opened first if there is none.
    async fn open(&self) -> Result<Arc<Session>, Trouble> {
        let mut current = self.session.lock().await;
        if let Some(session) = &*current {
            return Ok(session.clone());
        }
        let params = json!({
            "protocolVersion": VERSION, "capabilities": {},
            "clientInfo": {"name": "rlood", "version": env!("CARGO_PKG_VERSION")},
        });
        let body = json!({"jsonrpc": "2.0", "id": "initialize", "method": "initialize", "params": params}).to_string();
        let opened = self.post("initialize", &body, &[("accept", ACCEPTED)]).await;
        let (answer, headers) = match opened {
            Err(Trouble::SessionGone) => {
                return Err(Trouble::Permanent("the service answered 404 Not Found".to_owned()));
            }
            other => other?,
        };
        let Answer::Result(result) = answer else {
            return Err(Trouble::Permanent("the MCP server refused to initialize a session".to_owned()));
        };
        let id = headers.get("mcp-session-id").and_then(|id| id.to_str().ok()).map(str::to_owned);
        let version = result["protocolVersion"].as_str().unwrap_or(VERSION).to_owned();
        let session = Arc::new(Session { id, version });
        let done = json!({"jsonrpc": "2.0", "method": "notifications/initialized"}).to_string();
        self.endpoint
            .post(("initialized", &done), &session.headers(), async |_, response| {
                match trouble_of(response.status(), response.headers()) {
                    Some(trouble) => Err(trouble),
                    None if response.status().is_success() => Ok(()),
                    None => Err(Trouble::Permanent(format!("the service answered {}", response.status()))),
                }
            })
            .await?;
        *current = Some(session.clone());
        Ok(session)
    }

    async fn post(
        &self,
        id: &str,
        body: &str,
        headers: &[(&'static str, &str)],
    ) -> Result<(Answer, HeaderMap), Trouble> {
        self.endpoint.post((id, body), headers, async |endpoint, response| read(endpoint, response, id).await).await
    }
}

/// Reads the answer to the request with this id, from JSON or from a stream of events.
async fn read(endpoint: &Endpoint, response: Response, id: &str) -> Result<(Answer, HeaderMap), Trouble> {
    let (status, headers) = (response.status(), response.headers().clone());
    if status.as_u16() == 404 {
        return Err(Trouble::SessionGone);
    }
    if let Some(trouble) = trouble_of(status, &headers) {
        return Err(trouble);
    }
    if !status.is_success() {
        let said = endpoint.body(response).await?.unwrap_or_default();
        let said: String = String::from_utf8_lossy(&said).trim().chars().take(120).collect();
        return Err(Trouble::Permanent(format!("the service answered {status}: {said}")));
    }
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if kind.starts_with("text/event-stream") {
        return Ok((read_events(endpoint, response, id).await?, headers));
    }
    let Some(body) = endpoint.body(response).await? else { return Ok((Answer::TooLarge, headers)) };
    match answer_in(&body, id) {
        Some(answer) => Ok((answer, headers)),
        None => Err(Trouble::transient("the answer is not a JSON-RPC answer to the request")),
    }
}

async fn read_events(endpoint: &Endpoint, mut response: Response, id: &str) -> Result<Answer, Trouble> {
    let (mut line, mut data, mut size) = (Vec::new(), Vec::new(), 0);
    while let Some(chunk) = response.chunk().await.map_err(|error| crate::signed_post::SendError::new(&error))? {
        size += chunk.len();
        if size > 2 * MAX_BYTES {
            return Ok(Answer::TooLarge);
        }
        for &byte in &chunk {
            if byte != b'\n' {
                line.push(byte);
                continue;
            }
            let text = line.strip_suffix(b"\r").unwrap_or(&line);
            if let Some(part) = text.strip_prefix(b"data:") {
                if !data.is_empty() {
                    data.push(b'\n');
                }
                data.extend_from_slice(part.strip_prefix(b" ").unwrap_or(part));
            } else if text.is_empty() && !data.is_empty() {
                if data.len() > MAX_BYTES {
                    return Ok(Answer::TooLarge);
                }
                // Other messages of the stream are notifications, which need no answer.
                if let Some(answer) = answer_in(&endpoint.redacted(std::mem::take(&mut data)), id) {
                    return Ok(answer);
                }
            }
            line.clear();
        }
    }
    Err(Trouble::transient("the stream of events ended without an answer"))
}

/// Returns the answer to the request with this id, if the message is that.
fn answer_in(body: &[u8], id: &str) -> Option<Answer> {
    let message = crate::strict_json::read(body).ok()?;
    if message["id"] != id {
        return None;
    }
    if let Some(error) = message.get("error") {
        let text: String = error["message"].as_str().unwrap_or("the server gave no message").to_owned();
        return Some(Answer::Error { code: error["code"].as_i64().unwrap_or_default(), message: text });
    }
    message.get("result").cloned().map(Answer::Result)
}
