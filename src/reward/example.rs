//! A small reward service that speaks contract v1: an example, and the demo's grader.
