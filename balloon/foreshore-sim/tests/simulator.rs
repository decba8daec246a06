//! Tests of `foreshore-sim` on the command line.

#[path = "../../../pmem-volume/pmvol/tests/shell/complete.rs"]
mod complete;
#[path = "../../../pmem-volume/pmvol/tests/shell/umask.rs"]
mod umask;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use balloon::policy::Policy;
use balloon::sim::StorageParams;

fn sim(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_foreshore-sim");
    Command::new(program).args(arguments).output().expect("foreshore-sim starts")
}

fn printed(arguments: &[&str]) -> String {
    let output = sim(arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn bad_input_is_refused_with_value_and_bound() {
    let cases: [(&[&str], &str); 36] = [
        (&["--duration", "10"], "'10' for '--duration <TIME>': must be a time"),
        (&["--duration", "500ms"], "'500ms' for '--duration <TIME>': must be 1s to 87600h"),
        (&["--dram", "32M"], "'32M' for '--dram <SIZE>': must be 64M to 16T"),
        (&["--dram", "65M"], "'65M' for '--dram <SIZE>': must be a multiple of 2M"),
        (&["--dram", "64MB"], "\"64MB\" could be 64000000 or 67108864 bytes; use 64M"),
        (&["--vms", "0"], "'0' for '--vms <COUNT>': must be 1 to 1000"),
        (&["--refused", "1001"], "must be 0 to 1000"),
        (&["--storage-writes", "0"], "'0' for '--storage-writes <SIZE>': must be 1M to 1024T"),
        (&["--endurance", "0"], "'0' for '--endurance <COUNT>': must be 1 to 1000000"),
        (&["--swap", "tape"], "[possible values: none, disk, pm]"),
        (
            &["--workload", "tide"],
            "unknown workload \"tide\"; existing workloads: steady, ramp, burst",
        ),
        (&["--workload", "ramp,low=5"], "low is 5, must be 10 to 100000"),
        (
            &["--workload", "ramp,low=900,high=800"],
            "high is 800, must be at least low, which is 900",
        ),
        (
            &["--workload", "ramp,depth=1"],
            "parameter \"depth\" is unknown; parameters of ramp: low, high",
        ),
        (
            &["--workload", "leak,period=1m"],
            "\"period\" is unknown; parameters of leak: low, high, touches, hot, files, stream",
        ),
        (
            &["--workload", "steady,depth=1"],
            "parameters of steady: low, high, rate, touches, hot, files, stream, kernel\n",
        ),
        (&["--plot", "day.jpg"], "'day.jpg' for '--plot <FILE>': day.jpg must end in .svg or .png"),
        (&["--storage", "size=3M"], "size is \"3M\", must be a multiple of 2M"),
        (&["--storage", "sise=4M"], "parameter \"sise\" is unknown (did you mean 'size'?)"),
        (&["--storage", "storage_low=1M"], "storage_low is 1M, must be at least storage_min"),
        (
            &["--storage", "size=8G", "--pool", "4G"],
            "--storage size is 8G, must be at most --pool, which is 4G",
        ),
        (&["--policy", "magic"], "unknown policy \"magic\"; existing policies: psi, amf"),
        (&["--policy", "psy"], "unknown policy \"psy\" (did you mean 'psi'?); existing policies"),
        (&["--workload", "leek"], "unknown workload \"leek\" (did you mean 'leak'?); existing"),
        (&["--policy", "psi,horizn=3s"], "\"horizn\" is unknown (did you mean 'horizon'?); param"),
        (&["--policy", "psi,cooldown=3s"], "did you mean 'cool_down'?"),
        (&["--policy", "psi,headroom=9"], "headroom is 9, must be 10 to 500"),
        (&["--policy", "psi,headroom"], "\"headroom\" is not PARAM=VALUE"),
        (&["--policy", "psi,cool_down=5ms"], "cool_down is 5ms, must be 100ms to 24h"),
        (&["--policy", "psi,horizon=3s,ceiling=1M"], "ceiling is \"1M\", must be a multiple of 2M"),
        (
            &["--policy", "off,floor=4G,ceiling=2G"],
            "ceiling is 2G, must be at least floor, which is 4G",
        ),
        (
            &["--policy", "psi,cool_down=2m"],
            "max_cool_down is 1m, must be at least cool_down, which is 2m",
        ),
        (&["--policy", "psi,depth=1"], "; parameters of the rules: floor, ceiling, cool_down"),
        (&["--policy", "psi,lost=2s,lost=3s"], "lost is specified twice"),
        (
            &["--policy", "fixed"],
            "'fixed' for '--policy <NAME[,PARAM=VALUE...]>': size= is missing: the policy fixed needs it",
        ),
        (&["--policy", "fixed,floor=64M"], "size= is missing: the policy fixed needs it"),
    ];
    for (arguments, expected) in cases {
        let output = sim(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.starts_with("foreshore-sim: "), "{arguments:?}: {error}");
        assert!(error.contains(expected), "{arguments:?}: {error}\nlacks {expected}");
    }
}

/// Runs `foreshore-sim` with `args`. Returns the figures of each policy from the JSON output.
fn rows(args: &[&str]) -> Vec<serde_json::Value> {
    serde_json::from_str(&printed(&[args, &["--format", "json"]].concat())).expect("JSON")
}

fn figure(row: &serde_json::Value, key: &str) -> f64 {
    row[key].as_f64().expect("a number")
}

#[test]
fn policies_of_the_default_comparison_clearly_differ() {
    const KEYS: [&str; 4] = ["stall_s", "held_gib_h", "grows", "shrinks"];
    // The larger of two figures exceeds the smaller one by at least a third.
    let differ = |a: f64, b: f64| a.max(b) > a.min(b) * 4.0 / 3.0;
    for seed in ["1", "2", "3"] {
        let rows = rows(&["--seed", seed]);
        assert_eq!(rows.len(), Policy::NAMES.len());
        for (index, row) in rows.iter().enumerate() {
            for other in &rows[index + 1..] {
                let differs = |key: &str| differ(figure(row, key), figure(other, key));
                assert!(KEYS.iter().any(|key| differs(key)), "seed {seed}: {row:#} {other:#}");
            }
        }
        let stalled = rows.iter().filter(|row| figure(row, "stall_s") > 0.05);
        let stalled: Vec<_> = stalled.map(|row| row["policy"].as_str().expect("text")).collect();
        assert!(["psi", "pmb", "off"].iter().all(|name| stalled.contains(name)), "{stalled:?}");
        assert!(stalled.len() < rows.len(), "{stalled:?}");
    }
}

/// With the papers' factor, `amf` and `dapper` would hold the same amount of memory.
#[test]
fn policies_of_the_default_comparison_have_a_watermark_share() {
    let with_factor = rows(&["--policy", "amf", "--policy", "dapper"]);
    let [amf, dapper] = [0, 1].map(|row| figure(&with_factor[row], "held_gib_h"));
    assert!((amf - dapper).abs() < 0.005, "{amf} and {dapper}");
    let labels = rows(&[]);
    let labels = labels.iter().filter_map(|row| row["policy"].as_str());
    let with_share: Vec<_> = labels.filter(|label| label.contains("watermark-share=375")).collect();
    assert_eq!(with_share, ["amf,watermark-share=375", "dapper,watermark-share=375"]);
}

#[test]
fn unknown_parameter_is_reported_with_parameters_of_its_policy() {
    for name in Policy::NAMES {
        let policy = Policy::from_name(name).expect("listed");
        let table = policy.parameters().map_or(&[][..], |parameters| parameters.table());
        let known: Vec<_> = table.iter().map(|parameter| parameter.name).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        let given = format!("{name},size=64M,depth=1");
        let given = if name == "fixed" { given } else { given.replace(",size=64M", "") };
        let error = String::from_utf8(sim(&["--policy", &given]).stderr).expect("text");
        let expected = format!(
            "parameter \"depth\" is unknown; parameters of {name}: {known}; parameters of the rules: floor,"
        );
        assert!(error.contains(&expected), "{error}\nlacks {expected}");
    }
}

#[test]
fn invalid_trace_is_reported_with_its_line() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/trace-v1.jsonl");
    let damaged = folder.join("damaged.jsonl");
    let text =
        std::fs::read_to_string(golden).expect("golden").replace("\"at_ms\":1501", "\"at_ms\":1");
    std::fs::write(&damaged, text).expect("written");
    let cases = [
        (golden, "the trace has 1 reports, must be at least 2"),
        (
            damaged.to_str().expect("text"),
            "line 5 of the trace: at_ms is 1, but an earlier line has 1500",
        ),
        ("/nonexistent/trace", "cannot replay /nonexistent/trace: No such file"),
    ];
    for (path, expected) in cases {
        let output = sim(&["--trace", path]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{path}: {error}");
        assert!(error.contains(expected), "{path}: {error}\nlacks {expected}");
    }
}

/// Recorded with `--pressure policy=psi,record=` in a guest of 384 MiB. A process in this guest
/// fills 640 MiB, keeps them for some time, and ends.
const RECORDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/recorded-load.jsonl");

/// In the guest test of the same load, the guest does not swap under `psi`. Under `off`, it swaps
/// or kills a process.
#[test]
fn replay_of_recorded_load_swaps_only_under_policy_off() {
    let figures = |more: &[&str]| -> Vec<serde_json::Value> {
        let text = printed(&[&["--trace", RECORDED, "--format", "json"], more].concat());
        serde_json::from_str(&text).expect("JSON")
    };
    let all = figures(&[]);
    assert_eq!(all.len(), 7);
    for row in &all {
        let swapped_gib = row["swap_out_gib"].as_f64().expect("a number");
        // The process fills 640 MiB. Without more memory, the guest has 300 MiB.
        let expected_gib = if row["policy"] == "off" { 0.3..0.6 } else { 0.0..0.001 };
        assert!(expected_gib.contains(&swapped_gib), "{row:#}");
        assert_eq!(row["oom_kills"], 0, "{row:#}");
        assert_eq!(row["grows"] == 0, row["policy"] == "off", "{row:#}");
        assert!((17.0..19.0).contains(&row["run_s"].as_f64().expect("a number")), "{row:#}");
    }
    let without_swap = figures(&["--swap", "none", "--policy", "psi", "--policy", "off"]);
    let kills = |row: usize| without_swap[row]["oom_kills"].as_u64();
    assert_eq!(kills(0), Some(0), "{without_swap:#?}");
    assert!(kills(1) > Some(0), "{without_swap:#?}");
}

/// The guest of the recorded load, idle and shrunk by 512 MiB. The unplugged memory should not
/// count as demand.
#[test]
fn replay_does_not_grow_guest_for_memory_that_was_unplugged() {
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/recorded-shrinking.jsonl");
    let text = printed(&["--trace", trace, "--policy", "psi", "--format", "json"]);
    let rows: Vec<serde_json::Value> = serde_json::from_str(&text).expect("JSON");
    assert_eq!((&rows[0]["grows"], &rows[0]["held_gib_h"]), (&0.into(), &0.0.into()), "{rows:#?}");
}

#[test]
fn formats_agree_and_seed_determines_run() {
    let run = [
        "--workload",
        "burst",
        "--policy",
        "psi,horizon=3s",
        "--policy",
        "off",
        "--duration",
        "20m",
    ];
    let with = |more: &[&'static str]| printed(&[&run[..], more].concat());
    let json: serde_json::Value = serde_json::from_str(&with(&["--format", "json"])).expect("JSON");
    assert_eq!(json[0]["policy"], "psi,horizon=3s");
    assert_eq!(json[1]["grows"], 0);
    assert!(json[1]["swap_out_gib"].as_f64() > json[0]["swap_out_gib"].as_f64(), "{json:#}");

    let csv = with(&["--format", "csv"]);
    let lines: Vec<_> = csv.lines().collect();
    assert_eq!(lines.len(), 3);
    assert!(lines[0].starts_with("policy,") && lines[0].contains(",stall_s,"), "{}", lines[0]);
    assert!(lines[1].starts_with("\"psi,horizon=3s\","), "{}", lines[1]);
    assert!(lines.iter().all(|line| line.replace("psi,", "psi").split(',').count() == 23), "{csv}");

    let table = with(&[]);
    assert_eq!(table.lines().count(), 4);
    // `off` lends no memory, so the factor of Memorage's equations is 1.
    let last =
        |line: usize| table.lines().nth(line).expect("a line").split_whitespace().rev().take(3);
    assert!(last(1).eq(["x", "x", "x"]) && last(3).take(2).eq(["1.00", "1.00"]), "{table}");
    assert!(
        last(2).all(|figure| figure.parse::<f64>().is_ok_and(|figure| figure > 1.0)),
        "{table}"
    );
    let written = [json[0]["storage_wear"].as_f64(), json[0]["pooled_lifetime"].as_f64()];
    let heavy = with(&["--format", "json", "--storage-writes", "1T", "--endurance", "100"]);
    let heavy: serde_json::Value = serde_json::from_str(&heavy).expect("JSON");
    let heavy = [heavy[0]["storage_wear"].as_f64(), heavy[0]["pooled_lifetime"].as_f64()];
    assert!(heavy[0] < written[0] && heavy[1] < written[1], "{heavy:?} and {written:?}");
    assert_eq!(table, with(&[]), "the same result again");
    assert_ne!(table, with(&["--seed", "2"]));
    assert_eq!(with(&["--format", "csv"]), csv);
    // With `--every-report`, the controller is called more often, but the results are the same.
    assert_eq!(table, with(&["--every-report"]));
}

/// Keys in docs/reference/simulator.md, each with its heading in the table.
fn documented() -> Vec<(&'static str, &'static str)> {
    let docs = include_str!("../../../docs/reference/simulator.md");
    let (_, from) =
        docs.split_once("| key | in the table | |\n|---|---|---|\n").expect("the table");
    let (table, _) = from.split_once("\n\n").expect("the end of the table");
    let cells = |row: &'static str| {
        let mut cells = row.split('|').map(str::trim);
        let key = cells.nth(1).and_then(|key| key.strip_prefix('`')?.strip_suffix('`')).expect(row);
        (key, cells.next().expect(row))
    };
    table.lines().map(cells).collect()
}

#[test]
fn documented_keys_are_complete() {
    let with = |format| printed(&["--policy", "off", "--duration", "1m", "--format", format]);
    let json: Vec<serde_json::Map<String, serde_json::Value>> =
        serde_json::from_str(&with("json")).expect("JSON");
    let mut keys: Vec<_> = documented().iter().map(|(key, _)| *key).collect();
    keys.sort_unstable();
    assert!(json[0].keys().eq(keys.iter()), "{:?} differs from {keys:?}", json[0]);
    let csv = with("csv");
    let (policy, figures): (Vec<&str>, Vec<&str>) = keys.iter().partition(|key| **key == "policy");
    assert_eq!(csv.lines().next(), Some([policy, figures].concat().join(",").as_str()));
    let table = with("table");
    let mut headings = table.lines().next().expect("a line");
    for (_, heading) in documented() {
        headings = headings
            .trim_start()
            .strip_prefix(heading)
            .unwrap_or_else(|| panic!("{heading}: {headings}"));
    }
    assert_eq!(headings, "");
}

/// Section of docs/reference/simulator.md about storage.
fn storage_section() -> &'static str {
    let docs = include_str!("../../../docs/reference/simulator.md");
    let (_, section) = docs.split_once("\n## Storage\n").expect("the section");
    section.split_once("\n## ").expect("its end").0
}

#[test]
fn documented_day_with_storage_is_what_the_program_prints() {
    let mut lines = storage_section().lines();
    let command =
        lines.find_map(|line| line.strip_prefix("    foreshore-sim ")).expect("a command");
    let printed = printed(&command.split(' ').collect::<Vec<_>>());
    let block = storage_section().split("```").nth(1).expect("a table");
    let table = block.strip_prefix("text\n").expect("text");
    assert!(printed.ends_with(&format!("\n\n{table}")), "{printed}");
}

#[test]
fn static_split_leaves_no_memory_to_a_guest() {
    let args = ["--workload", "diurnal", "--duration", "24h", "--pool", "4G", "--policy", "psi"];
    let with = |storage| rows(&[&args[..], &["--storage", storage]].concat()).remove(0);
    let [split, lent] = ["spill=0", "size=4G"].map(with);
    assert_eq!((figure(&split, "won_gib_h"), figure(&split, "transfers")), (0.0, 0.0));
    assert_eq!(figure(&split, "stall_s").round(), 24_232.0, "as documented");
    assert_eq!(figure(&lent, "stall_s").round(), 0.0);
}

#[test]
fn documented_keys_and_parameters_of_storage_are_complete() {
    let row = rows(&["--policy", "off", "--duration", "1m", "--storage", "size=64M"]).remove(0);
    let without = rows(&["--policy", "off", "--duration", "1m"]).remove(0);
    let keys = row.as_object().expect("figures").keys().map(String::as_str);
    let keys = keys.filter(|key| without.get(key).is_none());
    let params = StorageParams::TABLE.iter().map(|param| param.name);
    let mut known: Vec<_> = keys.chain(params).collect();
    let rows = storage_section().lines().filter(|line| line.starts_with("| `"));
    let cells = rows.map(|row| row.split('|').nth(1).expect("a cell"));
    let mut documented: Vec<_> =
        cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
    known.sort_unstable();
    documented.sort_unstable();
    assert_eq!(documented, known);
}

/// Returns the average size of the hotplugged memory.
fn held_gib(row: &serde_json::Value) -> f64 {
    row["held_gib_h"].as_f64().expect("a number") * 3600.0
        / row["run_s"].as_f64().expect("a number")
}

/// `--pressure policy=psi,cool_down=2s,ceiling=256M,...` sets the policy and the rules that apply
/// to it.
#[test]
fn rules_of_policy_apply_in_replays_and_generated_runs() {
    let policies = [
        "psi",
        "psi,cool_down=100ms,shrink_interval=0ms,idle=1s,shrink_step=1G",
        "psi,ceiling=128M",
        "off,ceiling=128M",
        "fixed,size=64M,floor=256M",
        "psi,floor=512M,horizon=3s,ceiling=1G,lost=2s",
    ];
    let named: Vec<&str> = policies.iter().flat_map(|policy| ["--policy", policy]).collect();
    let sawtooth = ["--workload", "sawtooth,rate=1G", "--duration", "10m", "--format", "json"];
    for run in [&sawtooth[..], &["--trace", RECORDED, "--format", "json"]] {
        let text = printed(&[run, &named].concat());
        let rows: Vec<serde_json::Value> = serde_json::from_str(&text).expect("JSON");
        assert!(rows.iter().map(|row| row["policy"].as_str()).eq(policies.map(Some)), "{text}");
        let held: Vec<f64> = rows.iter().map(held_gib).collect();
        assert!(held[1] < held[0], "memory that is unplugged sooner is not held: {held:?}");
        assert!(
            held[2] > 0.0 && held[2] <= 0.125 && held[2] < held[0],
            "never above the ceiling: {held:?}"
        );
        assert_eq!(held[3], 0.0, "off stays off");
        // Plugging the memory takes a fraction of a second.
        assert!(held[4] > 0.2 && held[4] <= 0.25, "never below the floor: {held:?}");
        assert!(held[5] > 0.4 && held[5] <= 1.0, "both: {held:?}");
        // Skipping reports does not change the results under these rules either.
        assert_eq!(
            without_steps(&text),
            without_steps(&printed(&[run, &named, &["--every-report"]].concat()))
        );
    }
}

/// All figures except the numbers of decisions and of skipped reports.
fn without_steps(json: &str) -> Vec<&str> {
    json.lines()
        .filter(|line| !["\"steps\"", "\"skipped\""].iter().any(|name| line.contains(name)))
        .collect()
}

/// Returns the path of a file that does not exist.
fn temporary(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_file(&path);
    path
}

#[test]
fn plot_names_workload_guest_and_policies() {
    let path = temporary("plot.svg");
    let file = path.to_str().expect("text");
    let workload = ["--workload", "leak,high=3000", "--duration", "1m", "--vms", "2"];
    let policies = ["--policy", "psi", "--policy", "off"];
    printed(&[&workload[..], &policies, &["--plot", file]].concat());
    let svg = std::fs::read_to_string(&path).expect("an image");
    let texts = [
        "Workload leak,high=3000 for 1m",
        "guest with 1 GiB of DRAM, up to 256 MiB more and 4 GiB of PM, swap: disk; first of 2 VMs",
        "Policy psi: stalled 0.00 s",
        "Policy off: stalled ",
    ];
    for text in texts {
        assert!(svg.contains(&format!(">\n{text}")), "{text} is missing");
    }
    printed(&["--trace", RECORDED, "--policy", "off", "--plot", file]);
    let svg = std::fs::read_to_string(&path).expect("an image");
    assert!(svg.contains(">\nTrace recorded-load.jsonl for 17.8s\n"));
}

#[test]
fn plot_is_written_to_pipe_and_unwritable_path_is_refused() {
    printed(&["--duration", "1s", "--policy", "off", "--plot", "/dev/null"]);
    let output = sim(&["--duration", "1s", "--policy", "off", "--plot", "/nonexistent/plot.svg"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&output.stderr)
            .contains("cannot write /nonexistent/plot.svg: No such")
    );
    let policies = ["--policy", "off"].repeat(101);
    let output = sim(&[&["--duration", "1s", "--plot", "/dev/null"], &policies[..]].concat());
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("--plot for 101 policies, must be at most 100"), "{error}");
}

/// Each series has its own color, and texts are drawn in the program's own font.
#[test]
fn png_has_the_size_of_the_svg_and_all_series() {
    const COLORS: [[u8; 3]; 6] = [
        [173, 216, 240], // DRAM
        [247, 215, 150], // PM
        [0, 158, 115],   // available
        [0, 0, 0],       // used
        [213, 94, 0],    // in swap
        [204, 121, 167], // stalled
    ];
    const LEGEND_END: usize = 84;
    let run = ["--duration", "2m", "--policy", "psi", "--policy", "off", "--plot"];
    let [svg, png] = ["two.svg", "two.PNG"].map(temporary);
    for path in [&svg, &png] {
        printed(&[&run[..], &[path.to_str().expect("text")]].concat());
    }
    let file = std::io::BufReader::new(std::fs::File::open(png).expect("an image"));
    let mut reader = png::Decoder::new(file).read_info().expect("a PNG file");
    let mut bytes = vec![0; reader.output_buffer_size().expect("a size")];
    let info = reader.next_frame(&mut bytes).expect("pixels");
    let svg = std::fs::read_to_string(svg).expect("an image");
    let size = format!("<svg width=\"{}\" height=\"{}\" ", info.width, info.height);
    assert!(svg.contains(&size), "{size}");
    assert_eq!(info.width, 1000);
    let (pixels, _) = bytes.as_chunks::<3>();
    let (header, panels) = pixels.split_at(1000 * LEGEND_END);
    for color in COLORS {
        for (name, part) in [("legend", header), ("panels", panels)] {
            let count = part.iter().filter(|pixel| **pixel == color).count();
            assert!(count >= 20, "{count} pixels of {color:?} in the {name}");
        }
    }
    // The title is in the first 30 rows of pixels, which are otherwise white.
    let dark = header[..1000 * 30].iter().filter(|pixel| pixel.iter().all(|part| *part < 100));
    assert!(dark.count() > 500);
}

#[test]
fn plot_replaces_only_earlier_plot_or_empty_file() {
    use std::os::unix::fs::PermissionsExt;
    // This is the rule in docs/reference/consoles.md for files that flags name.
    let page = include_str!("../../../docs/reference/consoles.md");
    let rows: Vec<_> = page.lines().filter(|line| line.starts_with("| `foreshore-sim ")).collect();
    let row =
        "| `foreshore-sim --plot` | replaced if it is empty or an earlier plot | everything else |";
    assert_eq!(rows, [row]);
    let png = [b"\x89PNG\r\n\x1a\n".to_vec(), vec![0; 4096]].concat();
    let ext4 = [vec![0; 0x438], b"\x53\xef".to_vec(), vec![0; 4096]].concat();
    let foreign: [&[u8]; 8] = [
        b"mine",
        b"QFI\xfb\0\0\0\x03",
        b"XFSB",
        &ext4,
        &[0; 4096],
        b"<svg of another program>",
        b"<svg width=\"1000\" height=\"942\" viewBox=\"0 0 1000 942\">",
        &png,
    ];
    for extension in ["svg", "png"] {
        let path = temporary(&format!("somebodys.{extension}"));
        let args = ["--duration", "1s", "--policy", "off", "--plot", path.to_str().unwrap()];
        printed(&args);
        let plot = std::fs::read(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        // The earlier plot is longer, so its end would remain in the file if the file were not
        // truncated.
        printed(&[&args[..], &["--policy", "psi"]].concat());
        assert_ne!(std::fs::read(&path).unwrap(), plot);
        printed(&args);
        assert_eq!(std::fs::read(&path).unwrap(), plot);
        std::fs::write(&path, "").unwrap();
        printed(&args);
        assert_eq!(std::fs::read(&path).unwrap(), plot);
        for content in foreign {
            std::fs::write(&path, content).unwrap();
            let output = sim(&args);
            assert_eq!(output.status.code(), Some(1));
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            let expected = "the file exists and is not a plot of foreshore-sim";
            assert!(message.contains(expected), "{message}");
            assert_eq!(std::fs::read(&path).unwrap(), content);
        }
    }
}

/// Guest of 1 GiB that uses 100 MiB all day, except that it uses 600 MiB once for one second.
#[test]
fn plot_of_a_day_shows_burst_of_a_second() {
    const NOON_MS: u64 = 43_200_000;
    const MIB: u64 = 1 << 20;
    const USED: &str = "#000000";
    const IN_SWAP: &str = "#D55E00";
    let day = |burst_mib: u64| {
        let mut trace =
            r#"{"type":"trace","version":1,"boot_bytes":1073741824,"zones":[]}"#.to_owned();
        let reports = [
            (0, 100),
            (NOON_MS - 500, 100),
            (NOON_MS, burst_mib),
            (NOON_MS + 500, 100),
            (2 * NOON_MS, 100),
        ];
        for ((at, used_mib), seq) in reports.into_iter().zip(1..) {
            let free = (960 - used_mib) * MIB;
            trace += &format!(
                "\n{{\"type\":\"report\",\"at_ms\":{at},\"report\":{{\"version\":1,\"seq\":{seq},\"monotonic_ms\":{at},\
                 \"memory\":{{\"total_bytes\":{},\"free_bytes\":{free},\"available_bytes\":{free}}},\"zones\":[{{\"node\":0,\
                 \"kind\":\"normal\",\"free_pages\":0,\"min_pages\":0,\"low_pages\":0,\"high_pages\":0,\"managed_pages\":0}}]}}}}",
                960 * MIB,
            );
        }
        let (from, to) = (temporary("day.jsonl"), temporary("day.svg"));
        std::fs::write(&from, trace + "\n").expect("written");
        let [from, to] = [from.to_str().expect("text"), to.to_str().expect("text")];
        printed(&["--trace", from, "--policy", "off", "--plot", to]);
        let svg = std::fs::read_to_string(to).expect("drawn");
        // Lowest and highest position of the line for used memory. Zero is at the bottom.
        let place = |line: &str| -> Vec<f64> {
            let (_, points) = line.split_once(" points=\"").expect("points");
            let (points, _) = points.split_once('"').expect("the end of the lines");
            let y = |point: &str| point.split_once(',').expect("x,y").1.parse().expect("a number");
            points.split_whitespace().map(y).collect()
        };
        let line = |color: &str| {
            let is_line = |line: &&str| {
                line.starts_with("<polyline")
                    && line.contains(&format!("stroke=\"{color}\" stroke-width=\"2\""))
            };
            place(svg.lines().find(is_line).expect("a line"))
        };
        let bottom = line(IN_SWAP)[0];
        let heights = line(USED).into_iter().map(|y| bottom - y);
        let most = heights.clone().fold(0.0, f64::max);
        (most, heights.fold(most, f64::min))
    };
    let (highest, lowest) = day(600);
    assert!(highest > 5.5 * lowest && lowest > 0.0, "{highest} and {lowest}");
    let (highest, lowest) = day(100);
    assert!(highest == lowest, "{highest} and {lowest}");
}

#[test]
fn version_completion_and_manual_page_are_printed() {
    let version = printed(&["--version"]);
    let lines: Vec<_> = version.lines().collect();
    assert_eq!(lines[0], concat!("foreshore-sim ", env!("CARGO_PKG_VERSION")));
    assert!(lines[1].starts_with("commit ") && lines.len() == 2, "{version}");
    let page = printed(&["man"]);
    assert!(page.contains(".SH EXAMPLES") && page.contains(".SH EXIT STATUS"), "{page}");
    let completed = |words: &[&str]| {
        let words = [&["foreshore-sim"], words].concat();
        let program = env!("CARGO_BIN_EXE_foreshore-sim");
        complete::completions(program, &["completion", "bash"], Path::new("/"), &words)
    };
    assert_eq!(completed(&["--workl"]), "--workload");
    assert_eq!(completed(&["--policy", "da"]), "dapper");
    assert_eq!(completed(&["--policy", "psi,cool"]), "psi,cool_down=");
    assert_eq!(completed(&["--workload", "saw"]), "sawtooth");
    assert_eq!(completed(&["--format", "c"]), "csv");
}

#[test]
fn files_are_private_at_every_umask() {
    umask::check(env!("CARGO_BIN_EXE_foreshore-sim"));
}
