//! Tests of commands that a VM carries out, because it has the pool open.

mod shell;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread;

use pmem_volume::{Pool, Shrink, VolumeFormat, VolumeSize};
use serde_json::{Value, json};
use shell::Folder;

/// Answers one call as a VMM does, and returns the call's name and body.
fn answer_one(
    socket: &UnixListener,
    answer: impl FnOnce(&str, &Value) -> String,
) -> (String, Value) {
    let (stream, _) = socket.accept().unwrap();
    let mut reader = BufReader::new(&stream);
    let (mut first, mut length) = (String::new(), 0);
    reader.read_line(&mut first).unwrap();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if line.trim().is_empty() {
            break;
        }
        if let Some(text) = line.strip_prefix("Content-Length: ") {
            length = text.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let body = serde_json::from_slice(&body).unwrap_or_default();
    let call = first.split(' ').nth(1).unwrap().trim_start_matches("/api/v1/").to_owned();
    (&stream).write_all(format!("HTTP/1.1 {}", answer(&call, &body)).as_bytes()).unwrap();
    (call, body)
}

fn attached(pool: &Path, name: &str, interface: &str) -> Value {
    json!({ "pool": pool, "name": name, "interface": interface, "readonly": false })
}

/// Answer to `vm.volumes`.
fn volumes(attached: &[Value]) -> String {
    format!("200 \r\n\r\n{}", json!({ "volumes": attached }))
}

#[test]
fn pool_and_volume_in_use_grow_by_the_vm() {
    const MIB: u64 = 1 << 20;
    let folder = Folder::new();
    let path = folder.path("pool");
    let pool = Pool::create(&path, 64 * MIB, 0).unwrap();
    let size = VolumeSize::Bytes(20 * MIB);
    pool.create_volume("v", size, VolumeFormat::Btt).unwrap();
    std::fs::write(folder.path("other"), "").unwrap();
    std::os::unix::fs::symlink(&path, folder.path("link")).unwrap();
    let socket = UnixListener::bind(folder.path("vm.sock")).unwrap();
    thread::scope(|scope| {
        let vm = scope.spawn(|| {
            let grown = answer_one(&socket, |_, body| {
                pool.grow_in_use(body["size"].as_u64(), false, &mut |_| {}).unwrap();
                "204 \r\n\r\n".to_owned()
            });
            // The volume follows others of its name.
            let attached = [
                attached(&folder.path("other"), "v", "virtio-blk"),
                attached(&path, "v", "nvdimm"),
                attached(&folder.path("link"), "v", "virtio-blk"),
            ];
            let listed = answer_one(&socket, |_, _| volumes(&attached));
            let resized = answer_one(&socket, |_, body| {
                let size = VolumeSize::Bytes(body["desired_size"].as_u64().unwrap());
                pool.resize_volume("v", size, Shrink::Refuse).unwrap();
                "204 \r\n\r\n".to_owned()
            });
            answer_one(&socket, |_, _| volumes(&attached));
            let refused =
                answer_one(&socket, |_, _| "400 \r\n\r\n[\"disk v: too large\"]".to_owned());
            [grown, listed, resized, refused]
        });
        let by_vm = ["--api-socket", "vm.sock"];
        let grow = ["grow", "pool", "--size", "96M", "--json"];
        let grown = folder.json(&[&grow[..], &by_vm].concat());
        assert_eq!(grown["total_bytes"], 96 * MIB);
        let resize = ["volume", "resize", "pool", "v", "--size", "40M"];
        let text = folder.succeed(&[&resize[..], &by_vm].concat());
        assert!(text.contains("volume v resized: 40 MiB"), "{text}");
        folder.fail(&[&resize[..], &by_vm].concat(), &["vm.resize-disk", "disk v: too large"]);
        let [grown, listed, resized, refused] = vm.join().unwrap();
        assert_eq!(listed.0, "vm.volumes");
        assert_eq!(grown.0, "pool.grow");
        assert_eq!(grown.1, json!({ "path": path, "size": 96 * MIB, "force": false }));
        assert_eq!(resized.0, "vm.resize-disk");
        assert_eq!(resized.1, json!({ "id": "v", "desired_size": 40 * MIB }));
        assert_eq!(resized, refused);
    });
    let remaining = ["volume", "resize", "pool", "v", "--size", "remaining"];
    folder.fail(&[&remaining[..], &["--api-socket", "vm.sock"]].concat(), &["in use by"]);
    drop(pool);
    // A pool that is not in use needs no VM.
    folder.succeed(&["grow", "pool", "--size", "128M", "--api-socket", "none"]);
}

/// A disk whose ID is the name of the volume may belong to another pool or be a file.
#[test]
fn vm_without_the_volume_grows_no_disk() {
    const MIB: u64 = 1 << 20;
    let folder = Folder::new();
    let path = folder.path("pool");
    let pool = Pool::create(&path, 64 * MIB, 0).unwrap();
    let size = VolumeSize::Bytes(20 * MIB);
    pool.create_volume("v", size, VolumeFormat::Btt).unwrap();
    std::fs::copy(&path, folder.path("copy")).unwrap();
    let socket = UnixListener::bind(folder.path("vm.sock")).unwrap();
    let no_volume = "no volume v of the pool pool with interface=virtio-blk";
    for (answer, reason) in [
        (volumes(&[]), no_volume),
        (volumes(&[attached(&path, "w", "virtio-blk")]), no_volume),
        (volumes(&[attached(&path, "v", "nvdimm")]), no_volume),
        (volumes(&[attached(&folder.path("copy"), "v", "virtio-blk")]), no_volume),
        (volumes(&[attached(&folder.path("gone"), "v", "virtio-blk")]), no_volume),
        ("200 \r\n\r\n[]".to_owned(), "the answer to vm.volumes cannot be read"),
        ("404 \r\n\r\n[\"no machine\"]".to_owned(), "vm.volumes was refused: no machine"),
    ] {
        // A second call would wait without an end, because only one is answered.
        thread::scope(|scope| {
            scope.spawn(|| answer_one(&socket, |_, _| answer));
            let resize = "volume resize pool v --size 40M --api-socket vm.sock";
            folder.fail(&resize.split(' ').collect::<Vec<_>>(), &[reason]);
        });
    }
    assert_eq!(pool.volumes()[0].size_bytes, 20 * MIB);
}
