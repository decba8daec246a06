//! Tests with invalid reports, floods, and agents that do not read.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::atomic::Ordering;

use serde_json::json;

use super::*;
use crate::governor::agent::{self, Heard, LineBudget};
use crate::governor::fake::{
    BOOT_BYTES, Fixture, MIB, connection, fixture, hello, logged, report, runtime, serve,
};
use crate::governor::metrics::GuestSoftware;
use crate::governor::task::Clock;

#[test]
fn report_of_more_memory_than_vm_can_have_is_refused() {
    let mut f = fixture("psi", true);
    let unmanaged = UnmanagedMemory::default();
    f.core = f.core.with_unmanaged(unmanaged.clone());
    f.greet();
    // The guest uses a volume as memory, and a DIMM has been added.
    unmanaged.mapped_bytes.store(512 * MIB, Ordering::Relaxed);
    unmanaged.dimm_bytes.store(128 * MIB, Ordering::Relaxed);
    let most_bytes = BOOT_BYTES + (128 + 1024 + 512 + 128) * MIB;
    let mut say = |total_bytes: u64| {
        f.seq += 1;
        let mut line = report(f.seq, 300, [0, 0]);
        line["memory"]["total_bytes"] = json!(total_bytes);
        f.line(&line);
        (f.core.counters().reports, f.core.counters().refused.get("out_of_range").copied())
    };
    assert_eq!(say(most_bytes), (1, None), "the kernel keeps nothing");
    assert_eq!(say(most_bytes + 4096), (1, Some(1)));
}

#[test]
fn online_bytes_are_limited_to_plugged_bytes() {
    let mut f = fixture("off", true);
    f.greet();
    f.core.resize_zone("pm", 64 * MIB, TimeMs(0)).unwrap();
    let mut line = report(1, 300, [128 * MIB, 1024 * MIB]);
    line["memory"]["total_bytes"] = json!(384 * MIB);
    f.line(&line);
    let online = ["dram", "pm"].map(|id| f.core.zone_state(id, TimeMs(0)).online_bytes);
    assert_eq!(online, [Some(0), Some(64 * MIB)]);
}

/// Connects an agent whose hello contains `kernel` and `agent`. Returns the guest software in the
/// metrics.
fn software_after(f: &mut Fixture, kernel: &str, agent: &str) -> Option<GuestSoftware> {
    f.core.agent_gone(TimeMs(0));
    f.core.agent_connected(TimeMs(0));
    let mut line = hello();
    (line["kernel_release"], line["agent_version"]) = (json!(kernel), json!(agent));
    f.line(&line);
    f.core.sample(TimeMs(0)).guest
}

#[test]
fn reconnecting_agent_cannot_create_series_without_limit() {
    let mut f = fixture("psi", true);
    let series: Vec<_> = (0..1000)
        .filter_map(|nth| software_after(&mut f, &format!("6.12.{nth}"), "0.1.0"))
        .map(|software| software.kernel)
        .collect();
    assert_eq!(series, ["0", "1", "2", "3", "4"].map(|nth| format!("6.12.{nth}")));
}

#[test]
fn guest_software_has_short_plain_label_values() {
    let mut f = fixture("psi", true);
    let software = software_after(&mut f, "6.1{\"a\\b\"}", &"7".repeat(100)).unwrap();
    assert_eq!(software.kernel, "6.1__a_b__");
    assert_eq!(software.agent, "7".repeat(64));
}

/// Returns the requested sizes of both zones after each report of an agent whose hello contains
/// `kernel` as release and as version.
fn requests_of(kernel: &str) -> Vec<[u64; 2]> {
    let mut f = fixture("psi", true);
    f.core.agent_connected(TimeMs(0));
    let mut line = hello();
    (line["kernel_release"], line["kernel_version"]) = (json!(kernel), json!(kernel));
    f.line(&line);
    assert!(f.core.sample(TimeMs(0)).guest.is_some(), "the hello of {kernel:?} is refused");
    [[12; 20], [300; 20], [5; 20]]
        .concat()
        .into_iter()
        .map(|available_mib| {
            f.report(available_mib);
            [&f.dram, &f.pm].map(|zone| zone.sizes.lock().requested_bytes)
        })
        .collect()
}

#[test]
fn false_kernel_version_does_not_change_sizes() {
    let expected = requests_of("6.12.117");
    assert!(expected.iter().any(|sizes| *sizes != expected[0]), "{expected:?}");
    let long = "9".repeat(128);
    for kernel in ["5.15.0-25-generic", "6.1.0-56-cloud-amd64", "0", "-1", "%s\\n{}", &long] {
        assert_eq!(requests_of(kernel), expected, "{kernel}");
    }
}

#[test]
fn change_of_online_policy_is_logged_once() {
    let mut f = fixture("psi", true);
    f.greet();
    let mut said = |policy: &str| {
        let lines = logged(|| {
            for _ in 0..3 {
                f.seq += 1;
                let mut line = report(f.seq, 300, [0, 0]);
                line["blocks"]["online_policy"] = json!(policy);
                f.line(&line);
            }
        });
        let lines = lines.iter().filter(|line| line.contains("movable"));
        lines.map(|line| line.split_whitespace().nth(1).unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(said("online_movable"), [""; 0], "as it should be");
    assert_eq!(said("online"), ["WARN"]);
    assert_eq!(said("unknown"), [""; 0], "no news");
    assert_eq!(said("online"), [""; 0]);
    assert_eq!(said("online_movable"), ["INFO"]);
    assert_eq!(said("offline"), ["WARN"]);
}

/// A flood costs the host a limited number of lines per second. The other lines wait in the guest.
/// Lines are read and counted even if the agent has closed its end of the connection.
#[test]
fn rate_of_lines_is_bounded() {
    let Fixture { core, .. } = fixture("psi", true);
    let core = RefCell::new(core);
    let (mut agent, vmm) = connection();
    agent.write_all("no report\n".repeat(1_000).as_bytes()).unwrap();
    drop(agent);
    let took = serve(vmm, &core, &Clock::start());
    assert!(took >= Duration::from_secs(4), "{took:?}");
    assert_eq!(core.borrow().counters().refused.values().sum::<u64>(), 1_000);
}

/// A line that never ends is not counted as a line, but costs the host no more than many lines
/// would.
#[test]
fn rate_of_bytes_of_endless_line_is_bounded() {
    /// Number of bytes for 4 s. The bytes for the first second are accepted immediately.
    const FLOOD_BYTES: usize = 4 * 200 * 64 * 1024;
    let core = RefCell::new(fixture("psi", true).core);
    let (mut agent, vmm) = connection();
    let flood = std::thread::spawn(move || {
        let piece = [b'x'; 64 * 1024];
        (0..FLOOD_BYTES / piece.len()).for_each(|_| agent.write_all(&piece).unwrap());
        agent.shutdown(std::net::Shutdown::Write).unwrap();
        agent
    });
    let took = serve(vmm, &core, &Clock::start());
    assert!(took >= Duration::from_secs(3), "{took:?}");
    flood.join().unwrap();
    assert_eq!(core.borrow().counters().refused, BTreeMap::from([("too_long", 1)]));
}

/// For an agent that does not read, only the newest settings are queued. Its lines are still
/// handled.
#[test]
fn lines_of_agent_that_does_not_read_are_handled() {
    use std::os::fd::AsRawFd;
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt};
    const LINES: u64 = 100;
    const LAST: u64 = LINES << 20;
    let core = RefCell::new(fixture("off", true).core);
    let settings = Cell::new(Settings::with_watermark(0));
    let [agent, vmm] = {
        let (agent, vmm) = connection();
        // Smallest buffer that Linux permits, with room for a few lines.
        let bytes: libc::c_int = 1;
        // SAFETY: the socket is open, and `bytes` is an int that outlives the call.
        let result = unsafe {
            let (at, len) = ((&raw const bytes).cast(), size_of::<libc::c_int>() as u32);
            libc::setsockopt(vmm.as_raw_fd(), libc::SOL_SOCKET, libc::SO_SNDBUF, at, len)
        };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        [agent, vmm]
    };
    runtime().block_on(async {
        let [agent, vmm] = [agent, vmm].map(|stream| {
            stream.set_nonblocking(true).unwrap();
            tokio::net::UnixStream::from_std(stream).unwrap()
        });
        let (from, mut to) = agent.into_split();
        let talk = async {
            for line in 1..=LINES {
                settings.set(Settings::with_watermark(line << 20));
                to.write_all(b"no report\n").await.unwrap();
                while core.borrow().counters().refused.values().sum::<u64>() < line {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
            let mut received = tokio::io::BufReader::new(from).lines();
            let mut count = 1;
            while !received.next_line().await.unwrap().unwrap().contains(&LAST.to_string()) {
                count += 1;
            }
            assert!(count < LINES, "{count} lines waited for it");
        };
        let (clock, mut budget) = (Clock::start(), LineBudget::new());
        let (bytes, decide) = (AtomicU64::new(0), async |Heard { message, .. }| {
            core.borrow_mut().message(message, clock.now(), clock.boottime(), Duration::default);
        });
        let serve = agent::serve(vmm, || settings.get(), &bytes, &mut budget, balloon::parse_line, decide);
        tokio::select! {
            result = serve => panic!("{result:?}"),
            heard = tokio::time::timeout(Duration::from_secs(60), talk) => heard.expect("the agent is served"),
        }
    });
}
