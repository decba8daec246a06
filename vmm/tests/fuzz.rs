//! The fuzz targets without a fuzzer: a few thousand seeded inputs each, and whatever a fuzzer has found.

#[path = "../fuzz/harness/mod.rs"]
mod harness;

use std::path::Path;

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }

    /// Few edits mostly: many leave nothing that opens.
    fn input(&mut self) -> Vec<u8> {
        let length = 1 << self.below(8);
        (0..length).map(|_| self.below(256) as u8).collect()
    }
}

/// Inputs of a length as the fuzzer's are, then mutations of them, then what was found.
fn try_all(target: &str, run: fn(&[u8]), inputs: u64) {
    let mut random = Random(0x5eed_0000 + inputs);
    let mut said = Said { target, input: vec![] };
    for _ in 0..inputs / 2 {
        said.input = random.input();
        run(&said.input);
        let at = random.below(said.input.len() as u64) as usize;
        said.input[at] ^= 1 << random.below(8);
        run(&said.input);
    }
    let found = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/found").join(target);
    for entry in std::fs::read_dir(found).into_iter().flatten() {
        said.input = std::fs::read(entry.unwrap().path()).unwrap();
        run(&said.input);
    }
}

/// Prints the input that a run panics with: it goes into fuzz/found.
struct Said<'a> {
    target: &'a str,
    input: Vec<u8>,
}

impl Drop for Said<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{} panics with {:02x?}", self.target, self.input);
        }
    }
}

#[test]
fn any_chain_is_a_request_or_refused() {
    try_all("blk_request", harness::blk_request, 40_000);
}

/// A parser that takes the disk for larger, for writable, or for one of smaller blocks, as if a check were missing.
#[test]
fn a_parser_that_lacks_a_check_is_found_out() {
    use foreshore::virtio::block::request::Limits;
    type Wrong = fn(Limits) -> Limits;
    let wrongs: [(&str, Wrong); 4] = [
        ("capacity", |limits| Limits { capacity_bytes: u64::MAX, ..limits }),
        ("read-only", |limits| Limits { read_only: false, ..limits }),
        ("blocks", |limits| Limits { block_bytes: 512, ..limits }),
        ("features", |limits| Limits { discard: true, write_zeroes: true, ..limits }),
    ];
    for (name, wrong) in wrongs {
        let mut random = Random(0xbad_5eed);
        let found = (0..40_000).any(|_| {
            let input = random.input();
            std::panic::catch_unwind(|| harness::blk_request_by(&input, wrong)).is_err()
        });
        assert!(found, "without the check of {name} nothing fails");
    }
}

#[test]
fn any_chain_is_a_frame_or_a_place_for_one_or_refused() {
    try_all("net_request", harness::net_request, 10_000);
}

/// A parser that takes longer chains, or what was not agreed on, as if a check were missing.
#[test]
fn a_parser_of_frames_that_lacks_a_check_is_found_out() {
    use foreshore::virtio::net::header::Offloads;
    use foreshore::virtio::net::request::Limits;
    type Wrong = fn(Limits) -> Limits;
    let wrongs: [(&str, Wrong); 3] = [
        ("descriptors", |limits| Limits { max_descriptors: 16, ..limits }),
        ("checksums", |limits| Limits { offloads: Offloads { csum: true, ..limits.offloads }, ..limits }),
        ("segmentation", |limits| Limits { offloads: Offloads { tso4: true, ..limits.offloads }, ..limits }),
    ];
    for (name, wrong) in wrongs {
        let mut random = Random(0xbad_5eed);
        let found = (0..40_000).any(|_| {
            let input = random.input();
            std::panic::catch_unwind(|| harness::net_request_by(&input, wrong)).is_err()
        });
        assert!(found, "without the check of {name} nothing fails");
    }
}

#[test]
fn any_chain_of_a_balloon_is_pages_or_refused() {
    try_all("balloon_request", harness::balloon_request, 10_000);
}

/// Places as if somebody had taken PM for DRAM, or the end of memory for a page further on.
#[test]
fn a_balloon_that_gives_back_what_it_must_not_is_found_out() {
    use foreshore::memory::zone::Tier;
    use foreshore::virtio::balloon::request::Place;
    type Wrong = fn(Vec<Place>) -> Vec<Place>;
    let wrongs: [(&str, Wrong); 3] = [
        ("PM", |mut places| {
            places[2].tier = Tier::Dram;
            places
        }),
        ("the end", |mut places| {
            places[0].range.len += 4096;
            places
        }),
        ("the start", |mut places| {
            places[1].range.start += 4096;
            places[1].range.len -= 4096;
            places
        }),
    ];
    for (name, wrong) in wrongs {
        let mut random = Random(0xbad_5eed);
        let found = (0..10_000).any(|_| {
            let input = random.input();
            std::panic::catch_unwind(|| harness::balloon_request_by(&input, wrong)).is_err()
        });
        assert!(found, "without the check of {name} nothing fails");
    }
}

#[test]
fn whatever_an_agent_says_no_plan_leaves_its_bounds() {
    try_all("agent_report", harness::agent_report, 40_000);
}

/// A controller as if a check of its plans were missing.
#[test]
fn a_controller_that_lacks_a_bound_is_found_out() {
    use balloon::controller::Rules;
    type Wrong = fn(Rules) -> Rules;
    let wrongs: [(&str, Wrong); 3] = [
        ("the ceiling", |rules| Rules { ceiling_bytes: 1 << 46, ..rules }),
        ("the floor", |rules| Rules { floor_bytes: 0, ..rules }),
        ("the step", |rules| Rules { shrink_step_bytes: 1 << 46, ..rules }),
    ];
    for (name, wrong) in wrongs {
        let mut random = Random(0xbad_5eed);
        let found = (0..10_000).any(|_| {
            let input = random.input();
            std::panic::catch_unwind(|| harness::agent_report_by(&input, wrong)).is_err()
        });
        assert!(found, "without {name} nothing fails");
    }
}
