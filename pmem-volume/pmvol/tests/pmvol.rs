//! Tests of the `pmvol` program.

#[path = "shell/complete.rs"]
mod complete;
#[path = "shell/overwrite.rs"]
mod overwrite;
mod shell;
#[path = "shell/umask.rs"]
mod umask;

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use overwrite::overwrite;
use serde_json::Value;
use shell::Folder;

fn listed(folder: &Folder) -> Vec<Value> {
    let document = folder.json(&["volume", "list", "pool", "--json"]);
    document["volumes"].as_array().unwrap().clone()
}

#[test]
fn pool_is_created_filled_listed_and_checked() {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "64M", "--reserve", "8M"]);
    folder.succeed(&["volume", "create", "pool", "data", "--size", "20M", "--thick"]);
    folder.succeed(&["volume", "create", "pool", "dax", "--size", "4M", "--format", "raw"]);
    folder.succeed(&["volume", "create", "pool", "rest", "--size", "remaining", "--thick"]);
    let list = listed(&folder);
    let volumes: Vec<_> = list
        .iter()
        .map(|v| (v["name"].as_str().unwrap(), v["size_bytes"].as_u64().unwrap() >> 20))
        .collect();
    assert_eq!(volumes, [("data", 20), ("dax", 4), ("rest", 36)]);
    let info = folder.json(&["info", "pool", "--json"]);
    assert_eq!(info["durability"], "volatile");
    assert_eq!(
        (info["free_bytes"].as_u64(), info["volume_bytes"].as_u64()),
        (Some(0), Some(60 << 20))
    );
    assert_eq!(info["in_use_by"], Value::Null);
    let text = folder.succeed(&["info", "pool"]);
    assert!(text.contains("reserve      8 MiB (set by --reserve: "), "{text}");
    assert!(folder.succeed(&["check", "pool"]).ends_with("clean\n"));
    let full = ["--size", "the pool is full: nothing is free; `pmvol grow`"];
    folder.fail(&["volume", "create", "pool", "more", "--size", "remaining"], &full);
    folder.fail(&["volume", "resize", "pool", "data", "--size", "remaining"], &full);
    folder.succeed(&["grow", "pool", "--size", "96M"]);
    assert_eq!(folder.json(&["info", "pool", "--json"])["total_bytes"].as_u64(), Some(96 << 20));
    folder.succeed(&["volume", "resize", "pool", "data", "--size", "48M"]);
    folder.succeed(&["volume", "resize", "pool", "dax", "--size", "8M"]);
    folder.fail(
        &["volume", "resize", "pool", "dax", "--size", "4M"],
        &["--size", "4194304", "--shrink"],
    );
    folder.fail(
        &["volume", "resize", "pool", "data", "--size", "18M", "--shrink"],
        &["18874368", "the minimum size is 20971520", "without data"],
    );
    folder.succeed(&["volume", "resize", "pool", "data", "--size", "20M", "--shrink"]);
    folder.succeed(&["volume", "resize", "pool", "data", "--size", "48M"]);
    folder.fail(
        &["volume", "resize", "pool", "data", "--size", "50M"],
        &["--size", "52428800", "67108864"],
    );
    let waits = || folder.json(&["info", "pool", "--json"])["scrubbing_bytes"].as_u64();
    folder.succeed(&["volume", "resize", "pool", "dax", "--size", "4M", "--shrink"]);
    assert_eq!(waits(), Some(0), "removed chunks are erased when the command ends");
    assert!(folder.succeed(&["check", "pool"]).ends_with("clean\n"));
    folder.succeed(&["volume", "rename", "pool", "rest", "tail"]);
    folder.succeed(&["volume", "delete", "pool", "tail"]);
    assert_eq!(waits(), Some(0), "it is erased when the command ends");
    assert_eq!(folder.json(&["info", "pool", "--json"])["free_bytes"].as_u64(), Some(40 << 20));
}

#[test]
fn volume_is_split_into_named_parts() {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "128M"]);
    folder.succeed(&["volume", "create", "pool", "dax", "--size", "8M", "--format", "raw"]);
    folder.succeed(&["volume", "create", "pool", "data", "--size", "60M"]);
    overwrite(&folder.path("pool"), (4 << 20) + (6 << 20), b"of the last chunk");
    let text = folder.succeed(&[
        "volume",
        "split",
        "pool",
        "dax",
        "--into",
        "dax=6M",
        "--into",
        "tail=rest",
    ]);
    assert!(text.starts_with("volume dax split into 2:\n") && text.contains("tail  "), "{text}");
    folder.succeed(&["btt", "export", "pool", "tail", "--to", "out"]);
    assert!(std::fs::read(folder.path("out")).unwrap().starts_with(b"of the last chunk\0"));

    std::fs::write(folder.path("one"), [0x5a; 4096]).unwrap();
    folder.succeed(&["btt", "write", "pool", "data", "--sector", "4000", "--from", "one"]);
    let split = ["volume", "split", "pool", "data", "--into", "system=20M", "--into", "home=rest"];
    folder.fail(&split, &["cannot split volume \"data\"", "holds data", "--force"]);
    folder.succeed(&[&split[..], &["--force"]].concat());
    let list = listed(&folder);
    let volumes: Vec<_> = list.iter().map(|v| v["name"].as_str().unwrap()).collect();
    assert_eq!(volumes, ["dax", "home", "system", "tail"]);
    for name in ["system", "home"] {
        folder.succeed(&["btt", "export", "pool", name, "--to", "out", "--force"]);
        assert!(std::fs::read(folder.path("out")).unwrap().iter().all(|byte| *byte == 0), "{name}");
    }
    assert!(folder.succeed(&["check", "pool"]).ends_with("clean\n"));

    let refused = |into: &str, words: &[&str]| {
        folder.fail(&["volume", "split", "pool", "home", "--into", into, "--into", "b=20M"], words);
    };
    refused("a", &["--into", "\"a\" is not NAME=SIZE"]);
    refused("a=1X", &["--into", "1X", "K, M, G or T"]);
    refused("a=2M", &["--into", "home", "23068672 bytes (22 MiB)", "41943040 (40 MiB)"]);
    refused("a b=20M", &["a b", "' '"]);
    refused("system=20M", &["\"system\" already exists"]);
    folder.fail(&["volume", "split", "pool", "home"], &["--into"]);
}

#[test]
fn sizes_are_parsed_as_in_all_programs() {
    let folder = Folder::new();
    for text in ["64MiB", "64M", "65536K", "0.0625G", "67108864"] {
        folder.succeed(&["create", text, "--size", text]);
        assert_eq!(
            folder.json(&["info", text, "--json"])["total_bytes"].as_u64(),
            Some(64 << 20),
            "{text}"
        );
    }
    let both = ["--size", "64000000", "67108864", "64MiB"];
    folder.fail(&["create", "pool", "--size", "64MB"], &both);
    folder.fail(&["volume", "create", "64MiB", "data", "--size", "64MB"], &both);
}

#[test]
fn wrong_arguments_are_reported_and_create_nothing() {
    let folder = Folder::new();
    folder.fail(&["create", "pool", "--size", "1X"], &["--size", "1X", "K, M, G or T"]);
    folder.fail(&["create", "pool", "--size", "0"], &["--size", "pool size 0", "8 MiB"]);
    folder.fail(&["create", "pool", "--size", "1M"], &["--size", "1048576", "2 MiB"]);
    folder.fail(&["create", "pool", "--size", "1000T"], &["--size", "64 TiB"]);
    folder.fail(&["create", "pool", "--size", "50T"], &["--size", "50 TiB", "free"]);
    folder.fail(
        &["create", "pool", "--size", "64M", "--reserve", "1M"],
        &["--reserve", "1048576", "2 MiB"],
    );
    folder.fail(&["create", "pool", "--size", "64M", "--reserve", "64M"], &["--reserve", "60 MiB"]);
    folder.fail(
        &["create", "nowhere/pool", "--size", "64M"],
        &["nowhere/pool", "folder nowhere does not exist"],
    );
    folder.fail(&["create", "/dev/mistyped"], &["/dev/mistyped", "no such device", "lsblk"]);
    folder.fail(
        &["create", "/dev/mistyped", "--size", "64M"],
        &["/dev/mistyped", "no such device", "lsblk"],
    );
    folder.fail(&["info", "pool"], &["pool", "no such file"]);
    folder.fail(&["check", "/proc/self/exe"], &["not a pool"]);
    folder.fail(&["frobnicate"], &["frobnicate"]);
    assert_eq!(std::fs::read_dir(folder.0.path()).unwrap().count(), 0);

    folder.succeed(&["create", "pool", "--size", "64M"]);
    folder.fail(&["create", "pool", "--size", "64M"], &["already exists"]);
    folder.fail(
        &["grow", "pool", "--size", "64M"],
        &["--size", "pool size 67108864", "64 MiB", "cannot shrink"],
    );
    folder.fail(&["grow", "pool", "--size", "65M"], &["--size", "68157440", "2 MiB"]);
    folder.fail(&["grow", "pool", "--size", "1000T"], &["--size", "64 TiB"]);
    folder.fail(&["grow", "pool", "--size", "50T"], &["--size", "50 TiB", "free"]);
    folder.fail(
        &["grow", "nothing", "--size", "100M"],
        &["nothing", "no such file", "`pmvol create`"],
    );
    folder.fail(
        &["volume", "create", "pool", "v", "--size", "0"],
        &["--size", "volume size 0", "2 MiB"],
    );
    folder.fail(&["volume", "create", "pool", "v", "--size", "16M"], &["--size", "18 MiB"]);
    folder.fail(
        &["volume", "create", "pool", "v", "--size", "62M"],
        &["--size", "62 MiB", "60 MiB free"],
    );
    folder.fail(&["volume", "create", "pool", "a,b", "--size", "20M"], &["a,b", "','"]);
    folder.fail(&["volume", "delete", "pool", "v"], &["\"v\"", "no volumes"]);
    folder.fail(&["volume", "rename", "pool", "v", "w"], &["\"v\"", "no volumes"]);
    folder.fail(&["volume", "rename", "pool", "v", "a b"], &["a b", "' '"]);
    folder.fail(&["volume", "rename", "pool", "v"], &["NEW"]);
    assert_eq!(folder.json(&["info", "pool", "--json"])["free_bytes"].as_u64(), Some(60 << 20));
}

#[test]
fn thin_flag_is_reported_and_unsuitable_devices_are_refused() {
    let folder = Folder::new();
    folder.fail(&["create", "pool"], &["--size", "pool", "a new file", "a size is required"]);
    folder.fail(&["create", "/dev/null"], &["/dev/null", "`mem`", "devdax"]);
    folder.fail(&["info", "/dev/null"], &["/dev/null", "`mem`", "devdax"]);
    let made = folder.run(&["create", "pool", "--size", "64M", "--thin"]);
    assert!(made.status.success());
    assert!(String::from_utf8(made.stderr).unwrap().contains("--thin changes nothing"));
    assert_eq!(
        folder.succeed(&["volume", "ls", "pool"]),
        folder.succeed(&["volume", "list", "pool"])
    );
    assert_eq!(folder.json(&["info", "pool", "--json"])["thin"], true);
    assert!(folder.succeed(&["info", "pool"]).contains("thin         yes"));
    folder.fail(&["grow", "pool"], &["--size", "the pool is in a file, so a size is required"]);
    let disk = tempfile::TempDir::new_in(std::env::current_dir().unwrap()).unwrap();
    for (name, thin) in [("thick", false), ("thin", true)] {
        let path = disk.path().join(name);
        let path = path.to_str().unwrap();
        let flag: &[&str] = if thin { &["--thin"] } else { &[] };
        folder.succeed(&[&["create", path, "--size", "16M"], flag].concat());
        let info = folder.json(&["info", path, "--json"]);
        assert_eq!(info["thin"], thin || info["durability"] == "volatile");
        if thin && info["durability"] != "volatile" {
            // The chunk table moves, and the command prints nothing about the chunks that it
            // leaves.
            let grown = folder.run(&["grow", path, "--size", "300G"]);
            assert!(grown.status.success() && grown.stderr.is_empty(), "{grown:?}");
            assert_eq!(folder.json(&["info", path, "--json"])["waiting_bytes"], 0);
        }
    }
}

#[test]
fn names_that_are_not_utf8_are_refused() {
    use std::os::unix::ffi::OsStrExt;
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "64M"]);
    folder.succeed(&["volume", "create", "pool", "größe", "--size", "20M"]);
    let before = std::fs::read(folder.path("pool")).unwrap();
    for arguments in [&["create"][..], &["delete"], &["rename", "größe"], &["resize"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_pmvol"))
            .arg("volume")
            .arg(arguments[0])
            .arg("pool")
            .args(&arguments[1..])
            .arg(std::ffi::OsStr::from_bytes(b"gr\xf6\xdfe"))
            .current_dir(folder.0.path())
            .output()
            .unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(r#""gr\xF6\xDFe" is not UTF-8; use letters"#), "{text}");
    }
    assert!(before == std::fs::read(folder.path("pool")).unwrap());
}

#[test]
fn pool_in_use_is_readable_and_refuses_changes() {
    let folder = Folder::new();
    let pool = pmem_volume::Pool::create(&folder.path("pool"), 64 << 20, 0).unwrap();
    pool.alloc_memory(10 << 20).unwrap();
    let me = format!("process {}", std::process::id());
    folder.fail(&["check", "pool"], &["in use by", &me]);
    folder.fail(&["volume", "create", "pool", "v", "--size", "20M"], &["in use by", &me]);
    folder.fail(&["volume", "rename", "pool", "v", "w"], &["in use by", &me]);
    folder.fail(&["scrub", "pool"], &["in use by", &me, "`pmvol info`"]);
    folder.fail(&["volume", "delete", "pool", "v"], &["in use by", &me]);
    let resize = ["volume", "resize", "pool", "v", "--size", "64M"];
    folder.fail(&resize, &["in use by", &me, "--api-socket lets its VM grow it"]);
    let grow = ["grow", "pool", "--size", "96M"];
    folder.fail(&grow, &["in use by", &me, "--api-socket lets its VM grow it"]);
    folder.fail(&[&grow[..], &["--api-socket", "none"]].concat(), &["API socket none", "No such"]);
    let info = folder.json(&["info", "pool", "--json"]);
    assert_eq!(info["memory_bytes"].as_u64(), Some(10 << 20));
    assert!(info["in_use_by"].as_str().unwrap().starts_with(&me));
    assert_eq!(info["in_use_by_pid"], std::process::id());
    assert_eq!(info["lendable_bytes"], 50 << 20);
    assert!(folder.succeed(&["info", "pool"]).contains("in use by    process"));
}

#[test]
fn leftovers_of_a_killed_vm_are_reported_and_erased_on_demand() {
    use std::os::unix::fs::FileExt;
    let folder = Folder::new();
    let pool = pmem_volume::Pool::create(&folder.path("pool"), 64 << 20, 0).unwrap();
    let extents = pool.alloc_memory(10 << 20).unwrap();
    let secret = extents[0].offset_bytes();
    pool.file().write_all_at(b"secret", secret).unwrap();
    assert!(folder.succeed(&["info", "pool"]).contains("memory     10 MiB"));
    // A process that ends returns no memory to the pool.
    drop(pool);
    let first_bytes =
        || std::fs::read(folder.path("pool")).unwrap()[secret as usize..][..6].to_vec();
    assert_eq!(first_bytes(), b"secret");
    let waits = "10 MiB (when it is needed, or now by `pmvol scrub pool`)";
    assert!(folder.succeed(&["info", "pool"]).contains(&format!("to be erased {waits}")));
    let waiting = folder.json(&["info", "pool", "--json"]);
    assert_eq!(
        (&waiting["waiting_bytes"], &waiting["lendable_bytes"]),
        (&(10 << 20).into(), &(60 << 20).into())
    );
    let check = folder.succeed(&["check", "pool"]);
    assert!(
        check.contains("10 MiB must be erased") && check.contains("`pmvol scrub pool`"),
        "{check}"
    );
    assert!(check.ends_with("clean\n"), "{check}");
    let check = folder.json(&["check", "pool", "--json"]);
    assert_eq!((&check["waiting_bytes"], &check["clean"]), (&(10 << 20).into(), &true.into()));

    let made = folder.run(&["volume", "create", "pool", "v", "--size", "20M"]);
    let note = String::from_utf8(made.stderr).unwrap();
    assert!(made.status.success());
    assert!(
        note.starts_with("pmvol: 10 MiB must be erased") && note.lines().count() == 1,
        "{note}"
    );
    assert_eq!(first_bytes(), b"secret");
    assert_eq!(folder.succeed(&["scrub", "pool"]), "pool pool: 10 MiB erased\n");
    assert_eq!(first_bytes(), [0; 6]);
    assert_eq!(folder.succeed(&["scrub", "pool"]), "pool pool: nothing to erase\n");
    assert!(!folder.succeed(&["info", "pool"]).contains("to be erased"));
    assert!(!folder.succeed(&["check", "pool"]).contains("erased"));
    let made = folder.run(&["volume", "rename", "pool", "v", "w"]);
    assert!(made.status.success() && made.stderr.is_empty(), "a warning without waiting chunks");
    folder.fail(&["scrub", "nothing"], &["nothing", "no such file", "`pmvol create`"]);
}

#[test]
fn check_reports_damage_with_its_place_and_changes_nothing() {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "64M"]);
    folder.succeed(&["volume", "create", "pool", "v", "--size", "20M"]);
    // The volume starts after two chunks of metadata. Its first info block is another 4 KiB further
    // on.
    overwrite(&folder.path("pool"), (4 << 20) + 4096 + 100, &[0xff]);
    let before = std::fs::read(folder.path("pool")).unwrap();
    let output = folder.run(&["check", "pool"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains("volume v: arena 0: damaged: the first info block"), "{text}");
    let last = "not clean: 1 finding; `pmvol repair pool --dry-run` lists the possible repairs\n";
    assert!(text.ends_with(last), "{text}");
    let json = folder.run(&["check", "pool", "--json"]);
    assert_eq!(json.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(report["volumes"][0]["btt"]["arenas"][0]["findings_total"], 1);
    assert_eq!(report["clean"], false);
    overwrite(&folder.path("pool"), 10, &[0xff]);
    let text = String::from_utf8(folder.run(&["check", "pool"]).stdout).unwrap();
    assert!(text.contains("pool: degraded: superblock 0 is damaged"), "{text}");
    let dry = folder.succeed(&["repair", "pool", "--dry-run"]);
    assert!(
        dry.contains("would repair: superblock 0")
            && dry.contains("would repair: volume v: arena 0"),
        "{dry}"
    );
    overwrite(&folder.path("pool"), 10, &before[10..11]);
    assert!(before == std::fs::read(folder.path("pool")).unwrap());
}

#[test]
fn missing_volume_subcommand_is_suggested() {
    let folder = Folder::new();
    folder.fail(&["list", "pool"], &["unrecognized subcommand 'list'", "exists: 'volume list'"]);
    folder.fail(&["chek", "pool"], &["exists: 'check'"]);
}

#[test]
fn repair_fixes_explained_damage_and_reports_the_rest() {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "64M"]);
    folder.succeed(&["volume", "create", "pool", "v", "--size", "20M", "--thick"]);
    assert_eq!(folder.succeed(&["repair", "pool"]), "nothing to repair\n");
    let good = std::fs::read(folder.path("pool")).unwrap();
    // The chunk table starts at 2 MiB. This clears the owner word of chunk 3, the second chunk of
    // the volume.
    overwrite(&folder.path("pool"), (2 << 20) + 3 * 16, &[0; 8]);
    folder.fail(&["volume", "list", "pool", "--frobnicate"], &["--frobnicate"]);
    folder.fail(&["volume", "delete", "pool", "v"], &["owner word of chunk C3", "pmvol repair"]);
    let text = folder.succeed(&["repair", "pool"]);
    assert!(
        text.contains("repaired: the owner word of chunk C3")
            && text.contains("chunk 1 of volume v\n")
            && text.ends_with("nothing left\n"),
        "{text}"
    );
    assert!(good == std::fs::read(folder.path("pool")).unwrap());
    // Without the copies in their wear words, the chunks cannot be distinguished.
    overwrite(&folder.path("pool"), (2 << 20) + 3 * 16, &[0; 32]);
    let output = folder.run(&["repair", "pool", "--dry-run"]);
    let text = String::from_utf8(output.stdout).unwrap();
    let hint = "`pmvol repair pool --give-up-volume v` deletes";
    assert!(text.contains(&format!("\n{hint}")), "{text}");
    let output = folder.run(&["repair", "pool", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["left"].as_array().unwrap().len(), 3);
    assert_eq!((&report["clean"], &report["dry_run"]), (&false.into(), &false.into()));
    assert!(report["hints"][0].as_str().unwrap().starts_with(hint), "{report}");
    assert_eq!(report["incomplete_volumes"], serde_json::json!(["v"]));
    folder.fail(&["repair", "nothing"], &["nothing", "no such file", "`pmvol create`"]);
    // Deletes the damaged volume.
    let text = folder.succeed(&["repair", "pool", "--give-up-volume", "v"]);
    assert!(
        text.contains("repaired: volume \"v\", which lacks") && text.ends_with("nothing left\n"),
        "{text}"
    );
    assert!(folder.succeed(&["check", "pool"]).ends_with("clean\n"));
    folder.fail(&["repair", "pool", "--give-up-volume", "v"], &["no such volume: \"v\""]);
}

#[test]
fn exit_codes_distinguish_damage_from_failed_checks() {
    let folder = Folder::new();
    let code = |arguments: &[&str]| folder.run(arguments).status.code();
    folder.succeed(&["create", "pool", "--size", "64M"]);
    assert_eq!((code(&["check", "pool"]), code(&["check"])), (Some(0), Some(2)));
    for command in ["check", "repair"] {
        assert_eq!(code(&[command, "nothing"]), Some(2), "{command}");
    }
    assert_eq!(code(&["info", "nothing"]), Some(1));
    let good = std::fs::read(folder.path("pool")).unwrap();
    std::fs::write(folder.path("pool"), &good[..8 << 20]).unwrap();
    for command in ["check", "repair"] {
        assert_eq!(
            code(&[command, "pool"]),
            Some(1),
            "{command}: a pool that was cut short is damaged"
        );
        let text = String::from_utf8(folder.run(&[command, "pool"]).stderr).unwrap();
        assert!(text.ends_with("; see `pmvol check` and `pmvol repair`\n"), "{text}");
    }
}

#[test]
fn lost_superblocks_do_not_suggest_creating_a_pool() {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "64M"]);
    overwrite(&folder.path("pool"), 0, &[0; 4096]);
    overwrite(&folder.path("pool"), (2 << 20) - 4096, &[0; 4096]);
    for arguments in
        [&["info", "pool"][..], &["check", "pool"], &["repair", "pool"], &["grow", "pool"]]
    {
        let output = folder.run(arguments);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {text}");
        assert!(
            text.contains("both superblocks are lost") && !text.contains("pmvol create"),
            "{text}"
        );
    }
}

#[test]
fn repair_counts_unlisted_findings() {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "64M"]);
    folder.succeed(&["volume", "create", "pool", "v", "--size", "18M", "--thick"]);
    // Sectors 0 to 255 share the blocks of other sectors, so their content cannot be attributed.
    let info = folder.json(&["btt", "info", "pool", "v", "--json"]);
    let map_at = (4 << 20) + info["arenas"][0]["map_at_bytes"].as_u64().unwrap();
    let entries: Vec<u8> =
        (1000..1256u32).flat_map(|block| (block | 3 << 30).to_le_bytes()).collect();
    overwrite(&folder.path("pool"), map_at, &entries);
    let output = folder.run(&["repair", "pool"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text.matches("left: volume v: arena 0: ").count(), 101, "{text}");
    assert!(text.contains("left: volume v: arena 0: and 157 more\n"), "{text}");
    let check = String::from_utf8(folder.run(&["check", "pool"]).stdout).unwrap();
    assert!(check.contains("not clean: 257 findings"), "{check}");
}

#[test]
fn shell_completes_commands_and_flags() {
    let folder = Folder::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        assert!(folder.succeed(&["completion", shell]).contains("pmvol"), "{shell}");
    }
    folder.fail(&["completion", "tcsh"], &["tcsh", "bash"]);
    folder.succeed(&["create", "pool", "--size", "64M"]);
    folder.succeed(&["volume", "create", "pool", "data", "--size", "2M", "--format", "raw"]);
    folder.succeed(&["volume", "create", "pool", "logs", "--size", "2M", "--format", "raw"]);
    let completed = |words: &[&str]| {
        let words = [&["pmvol"], words].concat();
        let program = env!("CARGO_BIN_EXE_pmvol");
        complete::completions(program, &["completion", "bash"], folder.0.path(), &words)
    };
    assert_eq!(completed(&["vol"]), "volume");
    assert_eq!(completed(&["volume", "re"]), "rename resize");
    assert_eq!(completed(&["volume", "resize", "--sh"]), "--shrink");
    assert_eq!(completed(&["volume", "delete", "poo"]), "pool");
    let all = completed(&["volume", "delete", "pool", ""]);
    assert!(all.starts_with("data logs"), "{all}");
    assert_eq!(completed(&["volume", "rename", "pool", "lo"]), "logs");
    assert_eq!(completed(&["repair", "pool", "--give-up-volume", "d"]), "data");
    assert_eq!(completed(&["btt", "check", "pool", "d"]), "data");
    assert_eq!(completed(&["volume", "create", "pool", "d"]), "", "name of a new volume");
    assert_eq!(completed(&["volume", "delete", "nowhere", "d"]), "");
}

#[test]
fn version_has_commit_and_date_in_its_second_line() {
    let version = Folder::new().succeed(&["--version"]);
    let lines: Vec<_> = version.lines().collect();
    assert_eq!(lines[0], concat!("pmvol ", env!("CARGO_PKG_VERSION")));
    assert!(lines[1].starts_with("commit ") && lines.len() == 2, "{version}");
}

#[test]
fn manual_pages_match_the_help() {
    let folder = Folder::new();
    let page = folder.succeed(&["man"]);
    assert!(
        page.contains("\n.SH EXIT STATUS\n0: success;") && !page.contains("pmvol\\-help"),
        "{page}"
    );
    assert!(page.contains(".TH pmvol 1") && page.contains("\n.SH EXAMPLES\n"), "{page}");
    std::fs::create_dir(folder.path("pages")).unwrap();
    let other = "\n.SH EXTRA\n";
    std::fs::write(folder.path("pages").join("pmvolume.1"), other).unwrap();
    folder.succeed(&["man", "pages"]);
    let read = |name: &str| std::fs::read_to_string(folder.path("pages").join(name)).unwrap();
    for command in
        ["create", "info", "check", "grow", "repair", "scrub", "volume", "completion", "man"]
    {
        assert!(read(&format!("pmvol-{command}.1")).contains(".TH"), "{command}");
    }
    for command in ["create", "list", "resize", "rename", "delete"] {
        assert!(read(&format!("pmvol-volume-{command}.1")).contains("pool"), "{command}");
    }
    assert!(read("pmvol-volume-resize.1").contains("shrink"));
    assert!(read("pmvol-scrub.1").contains("\n.SH EXAMPLES\n"));
    assert_eq!(read("pmvolume.1"), other, "pages of other volumes are unchanged");
    std::fs::write(folder.path("file"), "").unwrap();
    folder.fail(&["man", "file"], &["manual pages", "file"]);
}

#[test]
fn help_of_every_command_has_an_example() {
    let folder = Folder::new();
    for command in [
        &["create"][..],
        &["grow"],
        &["info"],
        &["check"],
        &["repair"],
        &["scrub"],
        &["completion"],
        &["man"],
        &["volume", "create"],
        &["volume", "list"],
        &["volume", "resize"],
        &["volume", "rename"],
        &["volume", "delete"],
        &["volume", "export"],
        &["volume", "import"],
        &["btt", "export"],
        &["btt", "import"],
    ] {
        let help = folder.succeed(&[command, &["--help"]].concat());
        assert!(
            help.contains("Example") && help.contains(&format!("pmvol {}", command.join(" "))),
            "{help}"
        );
    }
}

#[test]
fn examples_of_the_help_work_in_order() {
    let folder = Folder::new();
    let help = folder.succeed(&["--help"]);
    let examples = help.split_once("Examples:\n").unwrap().1;
    let mut run = 0;
    for line in examples.lines().map_while(|line| line.strip_prefix("  pmvol ")) {
        // Two spaces separate the command from its comment.
        let command = line.split("  ").next().unwrap();
        if command.contains("/dev/") {
            continue;
        }
        // Uses about a hundredth of each size, because this test is about commands.
        let small = command.replace("/pm/pool", "pool").replace("G", "0M");
        folder.succeed(&small.split(' ').collect::<Vec<_>>());
        run += 1;
    }
    assert!(run >= 10, "{help}");
    assert_eq!(listed(&folder)[0]["name"], "home");
}

#[test]
fn failed_output_is_an_error_instead_of_a_panic() {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "64M"]);
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let command = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pmvol"));
        command.args(arguments).current_dir(folder.0.path());
        command
    };
    for arguments in [
        &["info", "pool"][..],
        &["info", "pool", "--json"],
        &["check", "pool"],
        &["repair", "pool"],
        &["scrub", "pool"],
        &["volume", "list", "pool"],
        &["volume", "create", "pool", "v", "--size", "20M"],
        &["completion", "bash"],
        &["man"],
    ] {
        let output = command(arguments).stdout(full()).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        // Check and repair exit with 2 because they could not report their result.
        let code = if ["check", "repair"].contains(&arguments[0]) { 2 } else { 1 };
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
        assert!(text.contains("cannot write to stdout: No space left"), "{arguments:?}: {text}");
    }
    let status = command(&["info", "nothing"]).stderr(full()).status().unwrap();
    assert_eq!(status.code(), Some(1));
    // With a closed pipe, the exit code still reports the findings.
    overwrite(&folder.path("pool"), 10, &[0xff]);
    for (arguments, code) in [(["info", "pool"], 0), (["check", "pool"], 1)] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = command(&arguments).stdout(writer).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        assert!(output.stderr.is_empty(), "{output:?}");
    }
}

#[test]
fn every_query_of_a_damaged_pool_reports_the_damage() {
    let folder = Folder::new();
    let info = || (folder.succeed(&["info", "pool"]), folder.json(&["info", "pool", "--json"]));
    folder.succeed(&["create", "pool", "--size", "64M"]);
    folder.succeed(&["volume", "create", "pool", "v", "--size", "20M", "--thick"]);
    let good = std::fs::read(folder.path("pool")).unwrap();
    let (text, json) = info();
    assert!(text.contains("state        ok\n") && !text.contains("damaged"), "{text}");
    assert_eq!(
        (&json["state"], &json["findings"], &json["damaged_bytes"]),
        (&"ok".into(), &0.into(), &0.into())
    );
    // Clears the owner word of chunk 3 in the chunk table.
    overwrite(&folder.path("pool"), (2 << 20) + 3 * 16, &[0; 8]);
    let (text, json) = info();
    assert!(text.contains("state        damaged: 2 findings, see `pmvol check pool`"), "{text}");
    assert!(text.contains("  damaged    2 MiB (") && !text.contains("to be erased"), "{text}");
    assert_eq!((&json["state"], &json["findings"]), (&"damaged".into(), &2.into()));
    assert_eq!((&json["damaged_bytes"], &json["waiting_bytes"]), (&(2 << 20).into(), &0.into()));
    let list = folder.run(&["volume", "list", "pool"]);
    let note = String::from_utf8(list.stderr).unwrap();
    assert!(
        list.status.success()
            && note.contains("the pool is damaged, so the list may be incomplete"),
        "{note}"
    );
    let text = String::from_utf8(folder.run(&["check", "pool"]).stdout).unwrap();
    assert!(text.contains("2 MiB have no known owner"), "{text}");
    let check = folder.run(&["check", "pool", "--json"]);
    let check: Value = serde_json::from_slice(&check.stdout).unwrap();
    assert_eq!(check["damaged_bytes"], 2 << 20);
    assert!(
        check["pool"].as_array().unwrap().iter().any(|finding| finding["severity"] == "damaged"),
        "{check}"
    );
    std::fs::write(folder.path("pool"), &good).unwrap();
    overwrite(&folder.path("pool"), 10, &[0xff]);
    let (text, json) = info();
    assert!(text.contains("state        degraded: 1 finding, see"), "{text}");
    assert_eq!((&json["state"], &json["findings"]), (&"degraded".into(), &1.into()));
}

#[test]
fn volume_with_damaged_btt_is_not_resized() {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "64M"]);
    folder.succeed(&["volume", "create", "pool", "v", "--size", "20M"]);
    // Damages the first info block.
    overwrite(&folder.path("pool"), (4 << 20) + 4096 + 100, &[0xff]);
    let before = std::fs::read(folder.path("pool")).unwrap();
    let words = ["\"v\"", "its BTT is damaged (1 finding(s))", "`pmvol check`"];
    folder.fail(&["volume", "resize", "pool", "v", "--size", "48M"], &words);
    assert!(before == std::fs::read(folder.path("pool")).unwrap());
    folder.succeed(&["repair", "pool"]);
    folder.succeed(&["volume", "resize", "pool", "v", "--size", "48M"]);
    assert!(folder.succeed(&["check", "pool"]).ends_with("clean\n"));
}

/// Separate tmpfs that the test can fill up.
struct SmallTmpfs(Folder);

impl SmallTmpfs {
    /// Returns `None` if the test cannot mount a file system.
    fn new(len_bytes: u64) -> Option<Self> {
        let folder = Folder::new();
        let size = format!("size={len_bytes}");
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "tmpfs"])
            .arg(folder.0.path())
            .output();
        if !mount.is_ok_and(|output| output.status.success()) {
            eprintln!("skipped: nothing can be mounted here (it needs root)");
            return None;
        }
        Some(Self(folder))
    }
}

impl Drop for SmallTmpfs {
    fn drop(&mut self) {
        Command::new("umount").arg("-l").arg(self.0.0.path()).status().unwrap();
    }
}

#[test]
fn full_tmpfs_error_names_required_and_free_bytes() {
    let Some(tmpfs) = SmallTmpfs::new(16 << 20) else { return };
    let folder = &tmpfs.0;
    folder.fail(&["create", "pool", "--size", "64M"], &["--size", "needs 64 MiB"]);
    folder.succeed(&["create", "pool", "--size", "16M"]);
    std::fs::write(folder.path("ballast"), vec![1; 15 << 20]).unwrap();
    let free = |text: &str| text.contains("but the file system has") && !text.contains("SIGBUS");
    for arguments in [
        &["create", "other", "--size", "8M"][..],
        &["volume", "create", "pool", "v", "--size", "2M", "--format", "raw"],
    ] {
        // Fills the tmpfs except for a few pages.
        let _ = std::fs::write(folder.path("rest"), vec![1; 1 << 20]);
        let output = folder.run(arguments);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(free(&text), "{arguments:?}: {text}");
    }
    assert!(!folder.path("other").exists());
    std::fs::remove_file(folder.path("ballast")).unwrap();
    folder.succeed(&["volume", "create", "pool", "v", "--size", "2M", "--format", "raw"]);
}

#[test]
fn files_are_private_at_every_umask() {
    umask::check(env!("CARGO_BIN_EXE_pmvol"));
}

#[test]
fn exported_image_is_private_at_every_umask() {
    for umask in [0o000, 0o022] {
        let folder = Folder::new();
        folder.succeed(&["create", "pool", "--size", "64M"]);
        folder.succeed(&["volume", "create", "pool", "v", "--size", "20M"]);
        let mut command = Command::new(env!("CARGO_BIN_EXE_pmvol"));
        command.current_dir(folder.0.path()).args(["btt", "export", "pool", "v", "--to", "image"]);
        assert!(umask::set(&mut command, umask).status().unwrap().success());
        for name in ["pool", "image"] {
            let mode = std::fs::metadata(folder.path(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{name} at umask {umask:03o}");
        }
    }
}
