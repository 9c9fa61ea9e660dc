//! Which addresses outgoing requests may reach.
