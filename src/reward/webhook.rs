//! Contract v1 over HTTP, the client's side.
