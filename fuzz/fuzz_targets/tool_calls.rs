#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| rlood_fuzz::targets::tool_calls(bytes));
