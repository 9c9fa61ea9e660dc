//! The browser's pages: /docs.
