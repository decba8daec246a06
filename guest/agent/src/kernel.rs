//! What kind of kernel this is.

use std::fs;

use foreshore_proto::{PROTOCOL_VERSION, RawHello};

use crate::sys;

/// Longer texts would be refused.
const MAX_TEXT_CHARS: usize = 120;

/// The first message of a connection.
pub fn hello() -> RawHello {
    let (release, version) = sys::kernel().unwrap_or_default();
    // debugfs is not mounted everywhere, and only a dynamic kernel has the file.
    let dynamic = fs::read_to_string("/sys/kernel/debug/sched/preempt").unwrap_or_default();
    RawHello {
        version: PROTOCOL_VERSION,
        agent_version: env!("CARGO_PKG_VERSION").into(),
        kernel_release: release.chars().filter(char::is_ascii_graphic).take(MAX_TEXT_CHARS).collect(),
        preemption: preemption(&version, &dynamic).into(),
        page_size_bytes: sys::page_size_bytes(),
    }
}

/// The preemption model, from `uname -v` and, where it can be chosen at boot, from the scheduler's file, which has
/// the chosen one in parentheses.
fn preemption(uname_version: &str, dynamic: &str) -> &'static str {
    let has = |flag: &str| uname_version.split_whitespace().any(|word| word == flag);
    if has("PREEMPT_RT") {
        "rt"
    } else if has("PREEMPT_DYNAMIC") {
        let chosen = ["none", "voluntary", "full", "lazy"].into_iter();
        chosen.into_iter().find(|model| dynamic.contains(&format!("({model})"))).unwrap_or("dynamic")
    } else if has("PREEMPT") {
        "full"
    } else {
        "static"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chosen_model_of_a_dynamic_kernel_is_found() {
        let debian = "#1 SMP PREEMPT_DYNAMIC Debian 6.12.117-1~deb12u1 (2026-11-14)";
        assert_eq!(preemption(debian, "none (voluntary) full\n"), "voluntary");
        assert_eq!(preemption(debian, "none voluntary (full) lazy\n"), "full");
        assert_eq!(preemption(debian, ""), "dynamic");
    }

    #[test]
    fn other_kernels_say_it_in_their_version() {
        assert_eq!(preemption("#1 SMP PREEMPT_RT Debian", ""), "rt");
        assert_eq!(preemption("#7 SMP PREEMPT Mon", ""), "full");
        assert_eq!(preemption("#7 SMP Mon", ""), "static");
    }

    #[test]
    fn our_own_hello_passes_verification() {
        foreshore_proto::Hello::try_from(hello()).expect("verifies");
    }
}
