//! Parses server-sent events as defined by the HTML standard (9.2.6).

/// Maximum size of an event, in bytes. The server's largest events contain samples.
const MAX_EVENT_BYTES: usize = 64 << 20;

/// One event of a stream.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Message {
    /// The field `id`; `None` = the event has none.
    pub(crate) id: Option<String>,
    /// The field `event`; empty = `message`.
    pub(crate) event: String,
    /// The field `data`, with lines joined by newlines.
    pub(crate) data: String,
}

/// Buffers bytes until they form a complete event.
#[derive(Debug, Default)]
pub(crate) struct Parser {
    buffer: Vec<u8>,
    /// Number of bytes of the buffer that have been parsed.
    read: usize,
    /// Number of bytes after the parsed ones that contain no line end.
    searched: usize,
    message: Message,
    has_data: bool,
}

impl Parser {
    /// Adds bytes to the buffer; returns false if an event is too long.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> bool {
        self.buffer.drain(..self.read);
        self.searched -= self.read;
        self.read = 0;
        self.buffer.extend_from_slice(bytes);
        self.buffer.len() + self.message.data.len() <= MAX_EVENT_BYTES
    }

    /// Returns the next complete event. An event that a broken connection leaves unfinished is never returned.
    pub(crate) fn next(&mut self) -> Option<Message> {
        loop {
            let found = self.buffer[self.searched..].iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            self.searched = found.map_or(self.buffer.len(), |at| self.searched + at);
            found?;
            let end = self.searched;
            let ending = match self.buffer[end..] {
                [b'\r', b'\n', ..] => 2,
                // After a carriage return, a line feed that belongs to the same line end may follow in the next chunk.
                [b'\r'] => return None,
                _ => 1,
            };
            let line = String::from_utf8_lossy(&self.buffer[self.read..end]).into_owned();
            self.read = end + ending;
            self.searched = self.read;
            if line.is_empty() {
                let message = std::mem::take(&mut self.message);
                if std::mem::take(&mut self.has_data) {
                    return Some(message);
                }
                continue;
            }
            self.read_field(line.strip_prefix('\u{feff}').unwrap_or(&line));
        }
    }

    fn read_field(&mut self, line: &str) {
        let (name, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match name {
            "event" => self.message.event = value.to_owned(),
            "data" => {
                if std::mem::replace(&mut self.has_data, true) {
                    self.message.data.push('\n');
                }
                self.message.data.push_str(value);
            }
            "id" if !value.contains('\0') => self.message.id = Some(value.to_owned()),
            // Comments, the field `retry` (the client has its own delays), and unknown fields are ignored.
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(id: Option<&str>, event: &str, data: &str) -> Message {
        Message { id: id.map(str::to_owned), event: event.to_owned(), data: data.to_owned() }
    }

    #[test]
    fn events_are_parsed_for_any_chunk_boundaries() {
        let text = "retry: 3000\n: events follow\n\nid: 1\nevent: step\ndata: {\"a\":\ndata:  1}\n\nevent: note\r\ndata\r\n\r\n\
                    event: no_data\n\ndata: é\r\rid: 2\ndata: unfinished\n";
        let expected = [message(Some("1"), "step", "{\"a\":\n 1}"), message(None, "note", ""), message(None, "", "é")];
        for cut in 0..text.len() {
            let mut parser = Parser::default();
            let mut found = Vec::new();
            for piece in [&text.as_bytes()[..cut], &text.as_bytes()[cut..]] {
                assert!(parser.push(piece));
                found.extend(std::iter::from_fn(|| parser.next()));
            }
            assert_eq!(found, expected, "cut at {cut}");
        }
    }

    #[test]
    fn an_event_without_end_is_refused() {
        let mut parser = Parser::default();
        let piece = vec![b'x'; 1 << 20];
        assert!((0..64).all(|_| parser.push(&piece)));
        assert!(!parser.push(&piece));
    }
}
