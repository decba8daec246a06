//! Tests of commands that a VM carries out, because it has the pool open.

mod shell;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixListener;
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
    let body = serde_json::from_slice(&body).unwrap();
    let call = first.split(' ').nth(1).unwrap().trim_start_matches("/api/v1/").to_owned();
    (&stream).write_all(format!("HTTP/1.1 {}", answer(&call, &body)).as_bytes()).unwrap();
    (call, body)
}

#[test]
fn pool_and_volume_in_use_grow_by_the_vm() {
    const MIB: u64 = 1 << 20;
    let folder = Folder::new();
    let path = folder.path("pool");
    let pool = Pool::create(&path, 64 * MIB, 0).unwrap();
    let size = VolumeSize::Bytes(20 * MIB);
    pool.create_volume("v", size, VolumeFormat::Btt).unwrap();
    let socket = UnixListener::bind(folder.path("vm.sock")).unwrap();
    thread::scope(|scope| {
        let vm = scope.spawn(|| {
            let grown = answer_one(&socket, |_, body| {
                pool.grow_in_use(body["size"].as_u64(), false, &mut |_| {}).unwrap();
                "204 \r\n\r\n".to_owned()
            });
            let resized = answer_one(&socket, |_, body| {
                let size = VolumeSize::Bytes(body["desired_size"].as_u64().unwrap());
                pool.resize_volume("v", size, Shrink::Refuse).unwrap();
                "204 \r\n\r\n".to_owned()
            });
            let refused =
                answer_one(&socket, |_, _| "400 \r\n\r\n[\"disk v: too large\"]".to_owned());
            [grown, resized, refused]
        });
        let by_vm = ["--api-socket", "vm.sock"];
        let grow = ["grow", "pool", "--size", "96M", "--json"];
        let grown = folder.json(&[&grow[..], &by_vm].concat());
        assert_eq!(grown["total_bytes"], 96 * MIB);
        let resize = ["volume", "resize", "pool", "v", "--size", "40M"];
        let text = folder.succeed(&[&resize[..], &by_vm].concat());
        assert!(text.contains("volume v resized: 40 MiB"), "{text}");
        folder.fail(&[&resize[..], &by_vm].concat(), &["vm.resize-disk", "disk v: too large"]);
        let [grown, resized, refused] = vm.join().unwrap();
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
