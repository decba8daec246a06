#![no_main]

#[path = "../harness/mod.rs"]
#[allow(dead_code, unused_imports)]
mod harness;

libfuzzer_sys::fuzz_target!(|data: &[u8]| harness::btt_engine(data));
