//! Tests of a line with a machine at one end and a client at the other.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use event_manager::SubscriberOps as _;
use rustix::event::PollFlags;

use super::super::readiness::ready;
use super::super::{ConsoleFiles, FileStart, Read, WindowSize, resize};
use super::ring::LEN_MAX;
use super::*;

/// Time limit for results that should be immediate. A longer wait fails the test.
const LIMIT: Duration = Duration::from_secs(20);

fn pty() -> ConsoleConfig {
    ConsoleConfig { mode: ConsoleMode::Pty, ..ConsoleConfig::default() }
}

fn socket(path: &Path) -> ConsoleConfig {
    ConsoleConfig {
        mode: ConsoleMode::Socket,
        socket: Some(path.to_owned()),
        ..ConsoleConfig::default()
    }
}

fn machine(lines: &Lines, config: &ConsoleConfig) -> HostConsole {
    HostConsole::open(Port::Serial, config, &mut ConsoleFiles::new(FileStart::Empty, lines.clone()))
        .unwrap()
        .unwrap()
}

fn sit_down(lines: &Lines) -> File {
    sit_down_at(&lines.path(Port::Serial).unwrap())
}

fn sit_down_at(path: &Path) -> File {
    File::options().read(true).write(true).custom_flags(libc::O_NOCTTY).open(path).unwrap()
}

/// Reads from `from` until the data ends with `end`.
fn read_to(mut from: impl std::io::Read + AsFd, end: &[u8]) -> Vec<u8> {
    let mut got = Vec::new();
    while !got.ends_with(end) {
        assert!(ready(from.as_fd(), PollFlags::IN, LIMIT).unwrap(), "after {got:?}");
        let mut byte = [0];
        assert_eq!(from.read(&mut byte).unwrap(), 1, "after {got:?}");
        got.push(byte[0]);
    }
    got
}

/// Reads the guest's input until it ends with `end`.
fn typed(console: &mut HostConsole, end: &[u8]) -> Vec<u8> {
    let input = console.input.as_mut().unwrap();
    let (mut got, since) = (Vec::new(), Instant::now());
    while !got.ends_with(end) {
        let mut byte = [0];
        match input.read(&mut byte).unwrap() {
            Read::Bytes(_) => got.push(byte[0]),
            Read::Nothing => assert!(since.elapsed() < LIMIT, "after {got:?}"),
            Read::End => panic!("the end of input after {got:?}"),
        }
    }
    got
}

#[test]
fn pseudo_terminal_keeps_the_newest_output_and_its_path_over_a_reboot() {
    let lines = Lines::default();
    let mut first = machine(&lines, &pty());
    let path = lines.path(Port::Serial).unwrap();
    assert_eq!(first.output.send(b"lost").len, 0);
    // Unread output is limited, and the oldest bytes are lost.
    assert_eq!(first.output.send(&vec![b'x'; LEN_MAX]).len, 4);
    assert_eq!(first.output.send(b"login: ").len, 7);
    let mut client = sit_down(&lines);
    assert_eq!(read_to(&client, b"login: ").len(), LEN_MAX);
    client.write_all(b"root\r").unwrap();
    assert_eq!(typed(&mut first, b"\r"), b"root\r");
    drop(first);
    let mut second = machine(&lines, &pty());
    assert_eq!(lines.path(Port::Serial).unwrap(), path);
    second.output.send(b"again");
    assert_eq!(read_to(&client, b"again"), b"again");
    client.write_all(b"ls\r").unwrap();
    assert_eq!(typed(&mut second, b"\r"), b"ls\r");
}

#[test]
fn output_without_a_client_is_kept_except_the_oldest() {
    let lines = Lines::default();
    let mut console = machine(&lines, &pty());
    for round in 0..3 {
        let mut client = sit_down(&lines);
        client.write_all(b"x").unwrap();
        typed(&mut console, b"x");
        let text = format!("with a client {round}.");
        console.output.send(text.as_bytes());
        assert!(read_to(&client, text.as_bytes()).ends_with(text.as_bytes()));
        drop(client);
        console.output.send(b"without a client.");
    }
    // The last output can be read only once.
    let client = sit_down(&lines);
    read_to(&client, b"without a client.");
    assert!(!ready(client.as_fd(), PollFlags::IN, Duration::ZERO).unwrap());
}

#[test]
fn terminal_without_a_client_causes_no_events() {
    let ring = Arc::new(Ring::new().unwrap());
    let pty = Pty::open().unwrap();
    let path = pty.path().to_owned();
    let (_keyboard, typing) = io::pipe().unwrap();
    let bridge = Bridge::new("--console", End::Pty(pty), None, Arc::clone(&ring), typing).unwrap();
    let mut manager = event_manager::EventManager::new().unwrap();
    manager.add_subscriber(bridge);
    let mut run_until_idle = || {
        let events = (0..).find(|_| manager.run_with_timeout(0).unwrap() == 0).unwrap();
        // Connecting or disconnecting a client and writing a line of output cause only a few
        // events.
        assert!(events < 20, "{events}");
    };
    run_until_idle();
    for _ in 0..3 {
        let client = sit_down_at(&path);
        run_until_idle();
        drop(client);
        run_until_idle();
        ring.push(b"unread");
        run_until_idle();
    }
}

#[test]
fn size_of_a_pseudo_terminal_is_reported_on_input_or_close() {
    let lines = Lines::default();
    let mut files = ConsoleFiles::new(FileStart::Empty, lines.clone());
    let mut console = HostConsole::open(Port::Console, &pty(), &mut files).unwrap().unwrap();
    let window = console.window.clone().unwrap();
    let is_notified = || {
        let since = Instant::now();
        while window.changed().read().is_err() {
            assert!(since.elapsed() < LIMIT, "no change of the window size was reported");
        }
    };
    let mut client = sit_down_at(&lines.path(Port::Console).unwrap());
    resize(&client, 100, 30);
    client.write_all(b"x").unwrap();
    typed(&mut console, b"x");
    is_notified();
    assert_eq!(window.size(), WindowSize { columns: 100, rows: 30 });
    // Sets the size as `stty -F` does, while another client is connected.
    let other = sit_down_at(&lines.path(Port::Console).unwrap());
    resize(&other, 80, 24);
    drop(other);
    is_notified();
    // A serial port cannot report the size.
    assert!(machine(&lines, &pty()).window.is_none());
}

#[test]
fn new_client_of_a_socket_replaces_the_old_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("serial");
    let lines = Lines::default();
    let mut console = machine(&lines, &socket(&path));
    assert_eq!(lines.path(Port::Serial), None);
    console.output.send(b"before the first client.");
    let mut first = UnixStream::connect(&path).unwrap();
    assert_eq!(read_to(&first, b"."), b"before the first client.");
    first.write_all(b"one\n").unwrap();
    assert_eq!(typed(&mut console, b"\n"), b"one\n");
    let mut second = UnixStream::connect(&path).unwrap();
    second.write_all(b"two\n").unwrap();
    assert_eq!(typed(&mut console, b"\n"), b"two\n");
    assert_eq!(first.read(&mut [0]).unwrap(), 0, "the first client is still connected");
    console.output.send(b"hello.");
    assert_eq!(read_to(&second, b"."), b"hello.");
    drop(second);
    // Input from a later client is not lost when the earlier client disconnects.
    let mut third = UnixStream::connect(&path).unwrap();
    third.write_all(b"three\n").unwrap();
    assert_eq!(typed(&mut console, b"\n"), b"three\n");
    console.output.send(b"bye.");
    drop(console);
    drop(lines);
    assert_eq!(read_to(&third, b"."), b"bye.");
    assert_eq!(third.read(&mut [0]).unwrap(), 0);
    assert!(!path.exists(), "the socket outlived the VM");
}

#[test]
fn client_with_a_closed_sending_half_still_receives() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("serial");
    let lines = Lines::default();
    let mut console = machine(&lines, &socket(&path));
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"date\n").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(typed(&mut console, b"\n"), b"date\n");
    console.output.send(b"today.");
    assert_eq!(read_to(&client, b"."), b"today.");
}

#[test]
fn unread_input_delays_the_client_without_loss() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("serial");
    let lines = Lines::default();
    let mut console = machine(&lines, &socket(&path));
    let client = UnixStream::connect(&path).unwrap();
    client.set_nonblocking(true).unwrap();
    let text: Vec<u8> = (0..4 << 20).map(|n: u32| (n % 251) as u8).collect();
    let mut sent = 0;
    let mut got: Vec<u8> = Vec::new();
    let since = Instant::now();
    let mut was_stopped = false;
    while got.len() < text.len() {
        while sent < text.len() {
            match (&client).write(&text[sent..]) {
                Ok(len) => sent += len,
                Err(err) => {
                    assert_eq!(err.kind(), io::ErrorKind::WouldBlock);
                    was_stopped = true;
                    break;
                }
            }
        }
        let mut data = [0; 4096];
        match console.input.as_mut().unwrap().read(&mut data).unwrap() {
            Read::Bytes(len) => got.extend(&data[..len]),
            _ => assert!(since.elapsed() < LIMIT, "after {} bytes", got.len()),
        }
    }
    assert!(was_stopped && got == text);
}

#[test]
fn client_that_does_not_read_does_not_block() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("serial");
    let lines = Lines::default();
    let mut console = machine(&lines, &socket(&path));
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"x").unwrap();
    typed(&mut console, b"x");
    let mut lost = 0;
    while lost == 0 {
        lost += console.output.send(&[b'y'; 1000]).len;
    }
    // Dropping the console does not wait either.
    drop(console);
    drop(lines);
}

#[test]
fn existing_path_is_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("serial");
    std::fs::write(&path, "mine").unwrap();
    let mut files = ConsoleFiles::new(FileStart::Empty, Lines::default());
    let error =
        HostConsole::open(Port::Console, &socket(&path), &mut files).err().unwrap().to_string();
    assert!(error.starts_with("--console: ") && error.ends_with("is not a socket"), "{error}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
}
