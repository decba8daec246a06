//! Runs fuzz targets without a fuzzer: several thousand seeded inputs for each target, and inputs
//! that a fuzzer has found.

#[path = "../fuzz/harness/mod.rs"]
mod harness;
#[path = "../../pmem-volume/tests/seeded/mod.rs"]
mod seeded;

use seeded::{Random, try_all};

/// Change that simulates a missing check.
type Mistake<T> = fn(T) -> T;

/// Runs a target with each simulated mistake. At least one input should fail. Otherwise, the target
/// would not detect the missing check.
fn all_are_found_out<T>(inputs: u64, run: fn(&[u8], Mistake<T>), mistakes: &[(&str, Mistake<T>)]) {
    for (name, mistake) in mistakes {
        let mut random = Random(0xbad_5eed);
        let found = (0..inputs).any(|_| {
            let input = random.input();
            std::panic::catch_unwind(|| run(&input, *mistake)).is_err()
        });
        assert!(found, "no input fails without the check of {name}");
    }
}

#[test]
fn any_block_chain_is_parsed_or_refused() {
    try_all("blk_request", harness::blk_request, 40_000);
}

/// The parser has the limits of a larger disk, a writable disk, or smaller blocks.
#[test]
fn missing_check_of_block_parser_is_detected() {
    use foreshore_devices::virtio::block::request::Limits;
    all_are_found_out::<Limits>(
        40_000,
        harness::blk_request_by,
        &[
            ("capacity", |limits| Limits { capacity_bytes: u64::MAX, ..limits }),
            ("read-only", |limits| Limits { read_only: false, ..limits }),
            ("blocks", |limits| Limits { block_bytes: 512, ..limits }),
            ("features", |limits| Limits { discard: true, write_zeroes: true, ..limits }),
        ],
    );
}

#[test]
fn any_net_chain_is_parsed_or_refused() {
    try_all("net_request", harness::net_request, 10_000);
}

/// The parser permits longer chains, or features that were not negotiated.
#[test]
fn missing_check_of_net_parser_is_detected() {
    use foreshore_devices::virtio::net::header::Offloads;
    use foreshore_devices::virtio::net::request::Limits;
    all_are_found_out::<Limits>(
        40_000,
        harness::net_request_by,
        &[
            ("descriptors", |limits| Limits { max_descriptors: 16, ..limits }),
            ("checksums", |limits| Limits {
                offloads: Offloads { csum: true, ..limits.offloads },
                ..limits
            }),
            ("segmentation", |limits| Limits {
                offloads: Offloads { tso4: true, ..limits.offloads },
                ..limits
            }),
        ],
    );
}

#[test]
fn any_balloon_chain_is_parsed_or_refused() {
    try_all("balloon_request", harness::balloon_request, 10_000);
}

/// Memory layouts with errors: PM counts as DRAM, a range starts or ends one page too late, or huge
/// pages count as small pages.
#[test]
fn broken_balloon_places_are_detected() {
    use foreshore_devices::memory::zone::Tier;
    use foreshore_devices::virtio::balloon::request::MemoryPart;
    all_are_found_out::<Vec<MemoryPart>>(
        10_000,
        harness::balloon_request_by,
        &[
            ("PM", |mut parts| {
                parts[2].tier = Tier::Dram;
                parts
            }),
            ("the end", |mut parts| {
                parts[0].range.len += 4096;
                parts
            }),
            ("the start", |mut parts| {
                parts[1].range.start += 4096;
                parts[1].range.len -= 4096;
                parts
            }),
            ("parts of huge pages", |mut parts| {
                parts.iter_mut().for_each(|part| part.unit_bytes = 4096);
                parts
            }),
        ],
    );
}

#[test]
fn plans_stay_in_bounds_for_any_agent_report() {
    try_all("agent_report", harness::agent_report, 40_000);
}

/// The controller's rules lack one of their bounds.
#[test]
fn missing_bound_of_controller_is_detected() {
    use balloon::controller::Rules;
    all_are_found_out::<Rules>(
        10_000,
        harness::agent_report_by,
        &[
            ("the ceiling", |rules| Rules { ceiling_bytes: 1 << 46, ..rules }),
            ("the floor", |rules| Rules { floor_bytes: 0, ..rules }),
            ("the step", |rules| Rules { shrink_step_bytes: 1 << 46, ..rules }),
        ],
    );
}

#[test]
fn any_kernel_is_loaded_into_boot_memory_or_refused() {
    try_all("kernel_payload", harness::kernel_payload, 4_000);
}

/// The loader receives a larger boot memory than the checks expect.
#[test]
fn missing_limit_of_kernel_loader_is_detected() {
    all_are_found_out::<u64>(
        4_000,
        harness::kernel_payload_by,
        &[("the end of memory", |memory_bytes| memory_bytes + 0x8_0000)],
    );
}
