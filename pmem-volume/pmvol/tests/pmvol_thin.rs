//! Tests of thin volumes with the program `pmvol`.

#[path = "shell/overwrite.rs"]
mod overwrite;
mod shell;

use overwrite::overwrite;
use pmem_volume::btt::Engine;
use pmem_volume::{OpenMode, Pool};
use serde_json::Value;
use shell::Folder;

const MIB: u64 = 1 << 20;

/// Allocated bytes of the volume. Checks that `pmvol` reports it as thin or thick.
fn allocated_bytes(folder: &Folder, thin: bool) -> u64 {
    let document = folder.json(&["volume", "list", "pool", "--json"]);
    let volume = &document["volumes"][0];
    assert_eq!(volume["thin"], Value::Bool(thin), "{volume}");
    volume["allocated_bytes"].as_u64().unwrap()
}

#[test]
fn new_volume_is_thin_and_keeps_its_size_in_the_pool() {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "128M"]);
    let created = folder.succeed(&["volume", "create", "pool", "data", "--size", "64M"]);
    assert!(created.contains("64 MiB, btt") && created.contains("thin, "), "{created}");
    assert!(allocated_bytes(&folder, true) <= 8 * MIB);
    let info = folder.json(&["info", "pool", "--json"]);
    assert_eq!(info["promised_bytes"], 64 * MIB);
    assert_eq!(info["reserved_bytes"], 64 * MIB);
    let full = ["--size", "the pool is full"];
    folder.fail(&["volume", "create", "pool", "more", "--size", "62M"], &full);
    folder.succeed(&["volume", "create", "pool", "rest", "--size", "remaining"]);
    let info = folder.json(&["info", "pool", "--json"]);
    assert_eq!(info["promised_bytes"], 124 * MIB);
    assert!(folder.succeed(&["check", "pool"]).ends_with("clean\n"));
}

#[test]
fn volumes_with_a_reserve_may_be_larger_than_the_pool() {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "64M"]);
    let create = ["volume", "create", "pool", "logs", "--size", "256M"];
    folder.fail(&create, &["the pool is full", "a smaller --reserve needs less"]);
    let created = folder.succeed(&[&create[..], &["--reserve", "40M"]].concat());
    assert!(created.contains("thin, 40 MiB guaranteed"), "{created}");
    let other = ["volume", "create", "pool", "more", "--size", "64M", "--reserve"];
    folder.fail(&[&other[..], &["22M"]].concat(), &["the pool is full"]);
    folder.succeed(&[&other[..], &["20M"]].concat());
    let info = folder.json(&["info", "pool", "--json"]);
    assert_eq!((&info["promised_bytes"], &info["lendable_bytes"]), (&(60 * MIB).into(), &0.into()));
    assert_eq!(info["provisioned_bytes"], 320 * MIB);
    let resized = folder.succeed(&["volume", "resize", "pool", "logs", "--reserve", "8M"]);
    assert!(resized.contains("thin, 8 MiB guaranteed"), "{resized}");
    let list = folder.json(&["volume", "list", "pool", "--json"]);
    assert_eq!(list["volumes"][0]["reserve_bytes"], 8 * MIB);
    folder.fail(&["volume", "resize", "pool", "logs", "--reserve", "42M"], &["the pool is full"]);
    folder.fail(&["volume", "resize", "pool", "logs", "--reserve", "258M"], &["exceeds the size"]);
    // The size can grow beyond the pool, but not all chunks can be allocated.
    folder.succeed(&["volume", "resize", "pool", "logs", "--size", "512M"]);
    folder.fail(&["volume", "convert", "pool", "logs", "--thick"], &["the pool is full"]);
    assert!(folder.succeed(&["check", "pool"]).ends_with("clean\n"));
}

#[test]
fn zeros_of_an_image_are_not_allocated_and_conversions_keep_the_content() {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "128M"]);
    let mut image = vec![0; 40 << 20];
    for (at, byte) in image[20 << 20..][..3 << 20].iter_mut().enumerate() {
        *byte = (at % 251) as u8 + 1;
    }
    std::fs::write(folder.path("image"), &image).unwrap();
    folder.succeed(&["volume", "create", "pool", "data", "--from", "image", "--thin"]);
    let exported = || {
        folder.succeed(&["volume", "export", "pool", "data", "--to", "copy", "--force"]);
        std::fs::read(folder.path("copy")).unwrap()
    };
    let is_same = |copy: Vec<u8>| {
        let (data, rest) = copy.split_at(image.len());
        data == image && rest.iter().all(|byte| *byte == 0)
    };
    let thin_bytes = allocated_bytes(&folder, true);
    assert!((3 * MIB..=16 * MIB).contains(&thin_bytes), "{thin_bytes}");
    let live =
        || folder.json(&["volume", "list", "pool", "--json"])["volumes"][0]["live_bytes"].clone();
    assert_eq!(live(), 3 * MIB);
    assert!(is_same(exported()));

    let text = folder.succeed(&["volume", "convert", "pool", "data", "--thick"]);
    assert!(text.starts_with("volume data is thick: "), "{text}");
    assert_eq!(live(), Value::Null);
    let list = folder.json(&["volume", "list", "pool", "--json"]);
    assert_eq!(list["volumes"][0]["size_bytes"], allocated_bytes(&folder, false));
    assert!(is_same(exported()));
    assert!(folder.succeed(&["check", "pool"]).ends_with("clean\n"));

    let text = folder.succeed(&["volume", "convert", "pool", "data", "--thin"]);
    assert!(text.starts_with("volume data is thin: ") && text.contains("allocated"), "{text}");
    assert!(allocated_bytes(&folder, true) <= thin_bytes);
    assert!(is_same(exported()));
    assert!(folder.succeed(&["check", "pool"]).ends_with("clean\n"));
}

/// All chunks with data or metadata of the volume lose their owner words, and so do free chunks.
#[test]
fn lost_owner_words_of_a_thin_volume_are_repaired() {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "64M"]);
    std::fs::write(folder.path("image"), vec![7; 5 << 20]).unwrap();
    folder.succeed(&["volume", "create", "pool", "data", "--from", "image", "--thin"]);
    folder.succeed(&["volume", "resize", "pool", "data", "--size", "40M"]);
    let good = std::fs::read(folder.path("pool")).unwrap();
    // The chunk table starts at 2 MiB.
    (2..32).for_each(|chunk| overwrite(&folder.path("pool"), (2 << 20) + chunk * 16, &[0; 8]));
    let check = folder.run(&["check", "pool"]);
    assert_eq!(check.status.code(), Some(1));
    let text = folder.succeed(&["repair", "pool"]);
    assert!(text.ends_with("nothing left\n"), "{text}");
    assert!(text.contains(" of volume data\n"), "{text}");
    assert!(good == std::fs::read(folder.path("pool")).unwrap());
    assert!(folder.succeed(&["check", "pool"]).ends_with("clean\n"));
}

#[test]
fn compaction_releases_space_and_keeps_the_content() {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "64M"]);
    folder.succeed(&["volume", "create", "pool", "data", "--size", "48M", "--thin"]);
    let is_kept = |sector: u64| sector.is_multiple_of(8);
    let content = |sector: u64| (sector + 1).to_le_bytes().repeat(512);
    {
        let pool = Pool::open(&folder.path("pool"), OpenMode::ReadWrite).unwrap();
        let engine = Engine::open(pool.open_volume("data").unwrap()).unwrap();
        for sector in 0..8192 {
            engine.write(sector, &content(sector)).unwrap();
        }
        (0..8192).filter(|sector| !is_kept(*sector)).for_each(|sector| {
            engine.write_zeroes(sector..sector + 1).unwrap();
        });
    }
    let before_bytes = allocated_bytes(&folder, true);
    let report = folder.json(&["volume", "compact", "pool", "data", "--json"]);
    let number = |field: &str| report[field].as_u64().unwrap();
    assert_eq!(number("released_bytes"), before_bytes - allocated_bytes(&folder, true));
    assert!(number("released_bytes") >= 20 * MIB, "{report}");
    assert!((1..=number("released_bytes") / 2).contains(&number("moved_bytes")), "{report}");
    let text = folder.succeed(&["volume", "compact", "pool", "data"]);
    assert_eq!(text, "volume data compacted: 0 released, 0 moved\n");
    assert!(folder.succeed(&["check", "pool"]).ends_with("clean\n"));
    let pool = Pool::open(&folder.path("pool"), OpenMode::ReadWrite).unwrap();
    let engine = Engine::open(pool.open_volume("data").unwrap()).unwrap();
    for sector in 0..8192 {
        let mut bytes = vec![1; 4096];
        engine.read(sector, &mut bytes).unwrap();
        let expected = if is_kept(sector) { content(sector) } else { vec![0; 4096] };
        assert!(bytes == expected, "{sector}");
    }
}

#[test]
fn impossible_thin_volumes_are_refused() {
    let folder = Folder::new();
    folder.succeed(&["create", "pool", "--size", "64M"]);
    folder.fail(
        &["volume", "create", "pool", "a", "--size", "20M", "--thin", "--format", "raw"],
        &["--thin", "a raw volume cannot be thin"],
    );
    folder.fail(&["volume", "convert", "pool", "a", "--thin"], &["no volume", "\"a\""]);
    folder.fail(&["volume", "convert", "pool", "a"], &["--thin|--thick"]);
    folder.fail(&["volume", "convert", "pool", "a", "--thin", "--thick"], &["cannot be used with"]);
    let full = ["--size", "the pool is full"];
    folder.fail(&["volume", "create", "pool", "a", "--size", "64M", "--thin"], &full);
    folder.succeed(&["volume", "create", "pool", "raw", "--size", "2M", "--format", "raw"]);
    let raw = ["\"raw\" is raw", "a raw volume cannot be thin"];
    folder.fail(&["volume", "convert", "pool", "raw", "--thin"], &raw);
    folder.succeed(&["volume", "convert", "pool", "raw", "--thick"]);
    folder
        .fail(&["volume", "compact", "pool", "raw"], &["\"raw\" is thick, and only a thin volume"]);
}
