//! Splits ndjson, CSV and JSON into rows. Bytes arrive in chunks of any size, and one row is kept in memory.

/// Why the bytes at a line are not a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Broken<'a> {
    pub code: &'static str,
    pub detail: &'a str,
    /// Whether the end of the bad row is unknown, so that nothing after it can be parsed.
    pub last: bool,
}

fn too_long(last: bool) -> Broken<'static> {
    Broken { code: "row_too_long", detail: TOO_LONG, last }
}

/// Placeholder for the error of a row that is too long; the reader, which knows the maximum size, writes the text.
const TOO_LONG: &str = "too long";

/// Callback that receives a row's line and its bytes.
type JsonRow<'r> = dyn FnMut(u64, Result<&[u8], Broken<'_>>) + 'r;
/// Callback that receives a row's line and its fields.
type CsvRow<'r> = dyn FnMut(u64, Result<&[Vec<u8>], Broken<'_>>) + 'r;

/// Splits rows at line breaks; blank lines are skipped.
#[derive(Debug)]
pub(super) struct LineSplit {
    /// Maximum row size, in bytes.
    limit: usize,
    line: u64,
    row: Vec<u8>,
    overlong: bool,
}

impl LineSplit {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, line: 0, row: Vec::new(), overlong: false }
    }

    pub(super) fn push(&mut self, mut bytes: &[u8], row: &mut JsonRow<'_>) {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            self.buffer_bytes(&bytes[..end]);
            self.emit(row);
            bytes = &bytes[end + 1..];
        }
        self.buffer_bytes(bytes);
    }

    pub(super) fn finish(&mut self, row: &mut JsonRow<'_>) {
        self.emit(row);
    }

    fn buffer_bytes(&mut self, bytes: &[u8]) {
        if self.overlong || self.row.len() + bytes.len() > self.limit {
            self.overlong = true;
            self.row = Vec::new();
        } else {
            self.row.extend_from_slice(bytes);
        }
    }

    fn emit(&mut self, row: &mut JsonRow<'_>) {
        self.line += 1;
        if std::mem::take(&mut self.overlong) {
            row(self.line, Err(too_long(false)));
        } else if !self.row.trim_ascii().is_empty() {
            row(self.line, Ok(self.row.trim_ascii()));
        }
        self.row.clear();
    }
}

/// Splits CSV by RFC 4180. A record may span lines inside quotes; LF, CRLF or CR ends it; empty lines are skipped.
#[derive(Debug)]
pub(super) struct CsvSplit {
    /// Maximum row size, in bytes.
    limit: usize,
    /// Separator between two fields.
    separator: u8,
    line: u64,
    begin: u64,
    state: CsvState,
    fields: Vec<Vec<u8>>,
    field: Vec<u8>,
    bytes: usize,
    after_cr: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CsvState {
    FieldStart,
    Bare,
    Quoted,
    /// Parser state after a quote inside a quoted field: the end of the field, or the first half of an escaped quote.
    QuoteInQuoted,
    Broken,
}

impl CsvSplit {
    pub(super) fn new(limit: usize, separator: u8) -> Self {
        let state = CsvState::FieldStart;
        let (fields, field) = (Vec::new(), Vec::new());
        Self { limit, separator, line: 1, begin: 1, state, fields, field, bytes: 0, after_cr: false }
    }

    pub(super) fn push(&mut self, bytes: &[u8], row: &mut CsvRow<'_>) {
        for byte in bytes.iter().copied() {
            if self.state == CsvState::Broken {
                return;
            }
            let lf_of_crlf = std::mem::take(&mut self.after_cr) && byte == b'\n';
            if byte == b'\n' && !lf_of_crlf || byte == b'\r' {
                self.line += 1;
            }
            self.after_cr = byte == b'\r';
            self.bytes += 1;
            if self.bytes > self.limit {
                self.field = Vec::new();
                self.state = CsvState::Broken;
                row(self.begin, Err(too_long(true)));
                return;
            }
            match (self.state, byte) {
                (CsvState::FieldStart, b'"') => self.state = CsvState::Quoted,
                (CsvState::Quoted, b'"') => self.state = CsvState::QuoteInQuoted,
                (CsvState::Quoted, _) => self.field.push(byte),
                (CsvState::QuoteInQuoted, b'"') => {
                    self.field.push(b'"');
                    self.state = CsvState::Quoted;
                }
                (_, byte) if byte == self.separator => self.end_field(),
                (_, b'\n') if lf_of_crlf => self.begin = self.line,
                (_, b'\n' | b'\r') => self.end_row(row),
                (CsvState::FieldStart | CsvState::Bare, _) => {
                    self.field.push(byte);
                    self.state = CsvState::Bare;
                }
                (CsvState::QuoteInQuoted, _) => {
                    self.state = CsvState::Broken;
                    let detail =
                        "a quoted field has text after its closing quote: write \"\" for a quote inside quotes";
                    row(self.begin, Err(Broken { code: "csv", detail, last: true }));
                }
                (CsvState::Broken, _) => return,
            }
        }
    }

    pub(super) fn finish(&mut self, row: &mut CsvRow<'_>) {
        match self.state {
            CsvState::Quoted => {
                let detail = "a quoted field begins here, and its closing quote is missing";
                row(self.begin, Err(Broken { code: "csv", detail, last: true }));
            }
            CsvState::Broken => {}
            CsvState::FieldStart | CsvState::Bare | CsvState::QuoteInQuoted => self.end_row(row),
        }
    }

    fn end_field(&mut self) {
        self.fields.push(std::mem::take(&mut self.field));
        self.state = CsvState::FieldStart;
    }

    fn end_row(&mut self, row: &mut CsvRow<'_>) {
        let blank = self.fields.is_empty() && self.field.is_empty() && self.state == CsvState::FieldStart;
        if !blank {
            self.end_field();
            row(self.begin, Ok(&self.fields));
        }
        self.fields.clear();
        self.bytes = 0;
        self.begin = self.line;
    }
}

/// Splits the elements of `[…]` or of `{"records": […]}`. A full JSON parser checks the content of each element later.
#[derive(Debug)]
pub(super) struct JsonSplit {
    /// Maximum row size, in bytes.
    limit: usize,
    line: u64,
    begin: u64,
    state: JsonState,
    in_object: bool,
    key: Vec<u8>,
    row: Vec<u8>,
    depth: u32,
    in_string: bool,
    escaped: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum JsonState {
    /// Parser state before the opening `[` or `{`.
    Start,
    /// Parser state after `{`, up to and including the `[` of the records.
    Key,
    /// Parser state before the first element or `]`.
    First,
    /// Parser state after a comma between elements.
    Next,
    Element,
    /// Parser state after an element, before a `,` or `]`.
    AfterElement,
    /// Parser state after the `]` of an object's records, before the object's `}`.
    CloseObject,
    End,
    Broken,
}

impl JsonSplit {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            line: 1,
            begin: 1,
            state: JsonState::Start,
            in_object: false,
            key: Vec::new(),
            row: Vec::new(),
            depth: 0,
            in_string: false,
            escaped: false,
        }
    }
}

const EXPECTED: &str = "a JSON list of rows, or {\"records\": [rows]}, is expected; \
                        for one object a line send 'content-type: application/x-ndjson'";

impl JsonSplit {
    pub(super) fn push(&mut self, bytes: &[u8], row: &mut JsonRow<'_>) {
        for byte in bytes.iter().copied() {
            if byte == b'\n' {
                self.line += 1;
            }
            self.byte(byte, row);
        }
    }

    pub(super) fn finish(&mut self, row: &mut JsonRow<'_>) {
        match self.state {
            JsonState::End | JsonState::Broken => {}
            JsonState::Start => {} // Nothing at all: an empty dataset.
            JsonState::Key => self.broken(EXPECTED, row),
            _ => self.broken("the JSON ends too early", row),
        }
    }

    fn byte(&mut self, byte: u8, row: &mut JsonRow<'_>) {
        if self.state == JsonState::Element {
            return self.element(byte, row);
        }
        if byte.is_ascii_whitespace() {
            return;
        }
        match (self.state, byte) {
            (JsonState::Broken, _) => {}
            (JsonState::Start, b'[') => self.state = JsonState::First,
            (JsonState::Start, b'{') => {
                self.in_object = true;
                self.state = JsonState::Key;
            }
            (JsonState::Key, b'[') if self.key == b"\"records\":" => self.state = JsonState::First,
            (JsonState::Key, _) if self.key.len() < 10 => self.key.push(byte),
            (JsonState::First | JsonState::AfterElement, b']') => {
                self.state = if self.in_object { JsonState::CloseObject } else { JsonState::End };
            }
            (JsonState::AfterElement, b',') => self.state = JsonState::Next,
            (JsonState::CloseObject, b'}') => self.state = JsonState::End,
            (JsonState::First | JsonState::Next, b',' | b']' | b'}') => {
                self.broken("there is no row between two commas or brackets", row)
            }
            (JsonState::First | JsonState::Next, _) => {
                self.begin = self.line;
                self.state = JsonState::Element;
                self.element(byte, row);
            }
            (JsonState::Start | JsonState::Key, _) => self.broken(EXPECTED, row),
            (JsonState::AfterElement, _) => self.broken("',' or ']' is expected after a row", row),
            (JsonState::CloseObject, _) => self.broken("the object must have no field but 'records'", row),
            (JsonState::End, _) => self.broken("there is text after the end of the JSON", row),
            (JsonState::Element, _) => {}
        }
    }

    fn element(&mut self, byte: u8, row: &mut JsonRow<'_>) {
        if self.in_string {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => self.in_string = false,
                _ => {}
            }
        } else {
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' => self.depth += 1,
                b',' | b']' if self.depth == 0 => {
                    self.emit(row);
                    return self.byte(byte, row);
                }
                b'}' | b']' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
        if self.row.len() == self.limit {
            self.row = Vec::new();
            self.state = JsonState::Broken;
            return row(self.begin, Err(too_long(true)));
        }
        self.row.push(byte);
    }

    fn emit(&mut self, row: &mut JsonRow<'_>) {
        self.state = JsonState::AfterElement;
        row(self.begin, Ok(self.row.trim_ascii()));
        self.row.clear();
    }

    fn broken(&mut self, detail: &str, row: &mut JsonRow<'_>) {
        self.state = JsonState::Broken;
        row(self.line, Err(Broken { code: "json", detail, last: true }));
    }
}
