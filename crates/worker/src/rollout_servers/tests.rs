//! The fleet over simulated servers, and vLLM's client over exchanges with a real server.

mod exchanges;
mod fleet;
mod vllm;
