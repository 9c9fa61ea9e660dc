//! Jobs: rows, claims, leases, moves.
