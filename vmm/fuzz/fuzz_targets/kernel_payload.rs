#![no_main]

#[path = "../harness/mod.rs"]
#[allow(dead_code, unused_imports)]
mod harness;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| harness::kernel_payload(bytes));
