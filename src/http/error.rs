//! RFC 9457 problems: the table of codes.
