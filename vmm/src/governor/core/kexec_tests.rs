//! A guest that starts another kernel by itself.

use balloon::{DriverState, ZoneSizes};

use super::*;
use crate::governor::ZoneDevice;
use crate::governor::fake::{Fixture, MIB, fixture, hello, report};
use balloon::governor::AgentState;

/// kexec: nothing of the VM begins anew but the guest's kernel, its driver, which first unplugs all
/// that it finds plugged (virtio_mem_init_hotplug), and its agent, whose clock and counters do.
#[test]
fn a_kernel_that_kexec_has_started_is_served_as_the_first_one_was() {
    let mut f = fixture("psi", false, true);
    f.greet();
    for nth in 0..100 {
        f.report(if nth == 0 { 20 } else { 150 });
    }
    let asked = |f: &Fixture| f.dram.sizes().requested_bytes + f.pm.sizes().requested_bytes;
    let before = asked(&f);
    assert!((MIB..900 * MIB).contains(&before), "{before}");
    let all = |f: &Fixture, change: fn(&mut ZoneSizes)| {
        [&f.dram, &f.pm].into_iter().for_each(|device| change(&mut device.sizes.lock()));
    };
    // 1. The old kernel is gone.
    all(&f, |sizes| sizes.driver = DriverState::Absent);
    f.core.agent_gone(TimeMs(5_000));
    for ms in (5_500..9_000).step_by(500) {
        f.core.tick(TimeMs(ms));
    }
    // 2. The new one takes its memory from the start.
    let requested = asked(&f);
    all(&f, |sizes| (sizes.driver, sizes.plugged_bytes) = (DriverState::Ready, 0));
    f.core.tick(TimeMs(9_000));
    assert_eq!(asked(&f), requested, "what was asked for it is to have");
    all(&f, |sizes| sizes.plugged_bytes = sizes.requested_bytes);
    f.core.tick(TimeMs(9_010));
    // 3. Its agent says less of everything than the old one's said, and is believed.
    f.core.agent_connected(TimeMs(9_500));
    f.bytes(Ok(hello().to_string().as_bytes()), TimeMs(9_500));
    let say = |f: &mut Fixture, seq: u64, available_mib| {
        let plugged = [&f.dram, &f.pm].map(|device| device.sizes().plugged_bytes);
        let line = report(seq, available_mib, plugged).to_string();
        f.bytes(Ok(line.as_bytes()), TimeMs(9_500 + seq * 50));
    };
    let needed = asked(&f);
    say(&mut f, 1, 20);
    assert!(f.core.counters().refused.is_empty(), "{:?}", f.core.counters().refused);
    assert!(asked(&f) > needed, "it is short and gets more than {needed}: {}", asked(&f));
    for seq in 2..=2_000 {
        say(&mut f, seq, 340);
    }
    assert!(asked(&f) < needed, "it has plenty and gives back: {}", asked(&f));
    assert_eq!(f.core.agent_state(TimeMs(9_500 + 100_000)), AgentState::Live);
}
