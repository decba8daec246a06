use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use std::{io, thread};

use tempfile::TempDir;

use super::super::muxer::{Token, Watch};
use super::super::packet::{Credit, Ended, GuestPort, HostPort, Link, Op};
use super::super::test_driver::{CID, Driver, MIB, QUEUE_SIZE, UNPLUGGED, new_view};
use super::*;
use crate::memory::view::GuestView;
use crate::virtio::vsock::GuestPorts;

const FEATURES: u64 = 1 << VIRTIO_F_VERSION_1;
const EVENT_IDX: u64 = FEATURES | 1 << VIRTIO_RING_F_EVENT_IDX;
const BOTH: Ended = Ended { receiving: true, sending: true };

/// A device on its own event loop. The order of the fields is the order in which they are dropped.
struct Fixture {
    device: VsockDevice,
    driver: Driver,
    dir: TempDir,
}

impl Fixture {
    fn idle(ports: VsockPorts) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vsock");
        let device = VsockDevice::new(CID as u32, &path, ports).unwrap();
        Self { device, driver: Driver::new(new_view()), dir }
    }

    fn new(features: u64) -> Self {
        let mut fixture = Self::idle(VsockPorts::new());
        fixture.driver.offer_all_rx_buffers();
        fixture.activate(features);
        fixture
    }

    fn activate(&mut self, features: u64) {
        self.device.activate(self.driver.activation(features)).unwrap();
    }

    fn path(&self, suffix: &str) -> PathBuf {
        self.dir.path().join(format!("vsock{suffix}"))
    }

    fn client(&self) -> UnixStream {
        let mut client = UnixStream::connect(self.path("")).unwrap();
        client.write_all(b"CONNECT 52\n").unwrap();
        client
    }

    fn connected_client(&mut self) -> (UnixStream, Link) {
        let mut client = self.client();
        let link = self.accept();
        assert_eq!(read_line(&mut client), format!("OK {}\n", link.host.0));
        (client, link)
    }

    /// Waits until the device reports that the host has left. It may report the end of the stream
    /// first, because it can read that before epoll reports the rest.
    #[track_caller]
    fn expect_host_left(&mut self, link: Link) {
        loop {
            let (packet, _) = self.driver.receive();
            let Op::Shutdown(ended) = packet.op else { panic!("unexpected {packet:?}") };
            assert!(packet.link == link && ended.sending);
            if ended == BOTH {
                return;
            }
        }
    }

    /// Accepts a client's connection on behalf of the guest.
    fn accept(&mut self) -> Link {
        let (packet, _) = self.driver.receive();
        assert_eq!((packet.op, packet.link.guest), (Op::Request, GuestPort(52)));
        self.driver.send(packet.link, Op::Response, &[]);
        packet.link
    }
}

fn read_line(stream: &mut UnixStream) -> String {
    let (mut line, mut byte) = (Vec::new(), [0]);
    while byte != *b"\n" {
        stream.read_exact(&mut byte).unwrap();
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

/// Returns bytes in which a lost or repeated packet can be detected.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let next = |state: &mut u64| {
        *state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Some((*state >> 56) as u8)
    };
    std::iter::repeat_with({
        let mut state = seed;
        move || next(&mut state).unwrap()
    })
    .take(len)
    .collect()
}

/// Performs the guest's side of a transfer in both directions. Sends `outgoing` as far as the
/// credit and the queue allow, and receives until the host has sent everything.
fn transfer(driver: &mut Driver, link: Link, mut host_credit: Credit, outgoing: &[u8]) -> Vec<u8> {
    let (mut sent, mut incoming, mut acknowledged) = (0, Vec::new(), 0);
    loop {
        let ended = driver.wait(|driver| {
            let mut moved = false;
            while let Some((packet, payload)) = driver.try_receive() {
                assert_eq!(packet.link, link);
                host_credit = packet.credit;
                incoming.extend(payload);
                driver.credit.fwd_cnt = incoming.len().try_into().unwrap();
                match packet.op {
                    Op::Shutdown(ended) if ended.sending => return Some(true),
                    Op::CreditRequest => acknowledged = 0,
                    _ => {}
                }
                moved = true;
            }
            let room = host_credit.buf_alloc - (sent as u32 - host_credit.fwd_cnt);
            let can_send = sent < outgoing.len() && room > 0 && driver.can_send();
            (moved || can_send).then_some(false)
        });
        if ended {
            assert_eq!(sent, outgoing.len(), "the host shut down before it received everything");
            return incoming;
        }
        let room = host_credit.buf_alloc - (sent as u32 - host_credit.fwd_cnt);
        let len = (outgoing.len() - sent).min(room as usize).min(64 * 1024);
        if len > 0 && driver.can_send() {
            driver.send_data(link, &outgoing[sent..sent + len]);
            sent += len;
            acknowledged = incoming.len();
        } else if incoming.len() - acknowledged >= 64 * 1024 {
            driver.send(link, Op::CreditUpdate, &[]);
            acknowledged = incoming.len();
        }
    }
}

fn transfer_one_mebibyte_both_ways(features: u64) {
    let mut fixture = Fixture::new(features);
    let (client, link) = fixture.connected_client();
    let (to_guest, to_host) = (pattern(MIB as usize, 1), pattern(MIB as usize, 2));
    let writer = thread::spawn({
        let (mut client, data) = (client.try_clone().unwrap(), to_guest.clone());
        move || client.write_all(&data).unwrap()
    });
    let reader = thread::spawn({
        let mut client = client;
        move || {
            let mut data = vec![0; MIB as usize];
            client.read_exact(&mut data).unwrap();
            writer.join().unwrap();
            client.shutdown(Shutdown::Write).unwrap();
            (client, data)
        }
    });
    let credit = Credit { buf_alloc: 128 * 1024, fwd_cnt: 0 };
    let received = transfer(&mut fixture.driver, link, credit, &to_host);
    let (mut client, sent) = reader.join().unwrap();
    assert!(received == to_guest, "the guest did not receive the data that the host sent");
    assert!(sent == to_host, "the host did not receive the data that the guest sent");
    fixture.driver.send(link, Op::Shutdown(BOTH), &[]);
    fixture.driver.expect(link, Op::Reset);
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    let metrics = fixture.device.metrics();
    assert_eq!(metrics.bytes_to_guest_total.get(), MIB);
    assert_eq!(metrics.bytes_from_guest_total.get(), MIB);
    assert_eq!(metrics.connections.get(), 0);
}

#[test]
fn one_mebibyte_is_transferred_in_both_directions() {
    transfer_one_mebibyte_both_ways(FEATURES);
}

#[test]
fn one_mebibyte_is_transferred_in_both_directions_with_event_indexes() {
    transfer_one_mebibyte_both_ways(EVENT_IDX);
}

#[test]
fn guest_reaches_a_server_with_a_payload_in_pieces() {
    let mut fixture = Fixture::new(EVENT_IDX);
    let listener = UnixListener::bind(fixture.path("_80")).unwrap();
    let link = Link { host: HostPort(80), guest: GuestPort(4000) };
    fixture.driver.send(link, Op::Request, &[]);
    let (mut server, _) = listener.accept().unwrap();
    fixture.driver.expect(link, Op::Response);
    let data = pattern(10_000, 3);
    fixture.driver.send_in_pieces(link, Op::Data { len_bytes: 10_000 }, &data, 3);
    let mut received = vec![0; data.len()];
    server.read_exact(&mut received).unwrap();
    assert_eq!(received, data);
    drop(server);
    fixture.expect_host_left(link);
}

#[test]
fn guest_reaches_a_port_in_this_process() {
    let mut ports = VsockPorts::new();
    let mut agents = ports.listen_in_process(1024, GuestPorts::All).unwrap();
    let mut fixture = Fixture::idle(ports);
    fixture.driver.offer_all_rx_buffers();
    fixture.activate(EVENT_IDX);
    let link = Link { host: HostPort(1024), guest: GuestPort(4000) };
    fixture.driver.send(link, Op::Request, &[]);
    let mut agent = agents.blocking_recv().unwrap();
    fixture.driver.expect(link, Op::Response);
    agent.write_all(b"hello").unwrap();
    assert_eq!(fixture.driver.receive().1, b"hello");
    agent.set_nonblocking(false).unwrap();
    fixture.driver.send_data(link, b"report");
    let mut received = [0; 6];
    agent.read_exact(&mut received).unwrap();
    assert_eq!(&received, b"report");
}

#[test]
fn memory_can_be_unplugged_while_the_guest_is_being_connected() {
    /// Allows a connection to be registered only after another thread has locked the view
    /// exclusively.
    struct Unplugger(GuestView);

    impl Watch for Unplugger {
        fn watch(&mut self, _: &UnixStream, _: Token) -> io::Result<()> {
            let (unplugged, done) = mpsc::channel();
            let view = self.0.clone();
            thread::spawn(move || {
                drop(view.exclusive());
                unplugged.send(()).unwrap();
            });
            done.recv_timeout(Duration::from_secs(60)).expect("a guard of unused memory");
            Ok(())
        }
        fn unwatch(&mut self, _: &UnixStream) {}
    }

    let dir = tempfile::tempdir().unwrap();
    let host = Arc::new(HostSide::bind(&dir.path().join("vsock"), VsockPorts::new()).unwrap());
    let _listener = UnixListener::bind(dir.path().join("vsock_80")).unwrap();
    let metrics = Arc::<VsockMetrics>::default();
    let muxer = Muxer::new(CID, host, Arc::clone(&metrics), GREETING_TIMEOUT, 16);
    let mut driver = Driver::new(new_view());
    driver.offer_all_rx_buffers();
    let mut activation = driver.activation(FEATURES);
    let queues = (activation.take_queue(0).unwrap(), activation.take_queue(1).unwrap());
    let (view, interrupt) = (activation.view, activation.interrupt);
    let mut worker = Worker::new(view.clone(), interrupt, queues, None, muxer, metrics).unwrap();
    let links = [4000, 4001].map(|guest| Link { host: HostPort(80), guest: GuestPort(guest) });
    for link in links {
        driver.send(link, Op::Request, &[]);
    }
    worker.pass(&mut Unplugger(view), Instant::now());
    // One pass answers both requests.
    for link in links {
        driver.expect(link, Op::Response);
    }
}

#[test]
fn early_client_is_served_after_the_activation() {
    let mut fixture = Fixture::idle(VsockPorts::new());
    let mut client = fixture.client();
    fixture.activate(FEATURES);
    // The packet waits until the guest provides a buffer.
    fixture.driver.offer_all_rx_buffers();
    let link = fixture.accept();
    assert_eq!(read_line(&mut client), format!("OK {}\n", link.host.0));
}

#[test]
fn device_works_after_a_reset_closed_connections() {
    let mut fixture = Fixture::new(EVENT_IDX);
    let (mut client, _) = fixture.connected_client();
    fixture.device.reset();
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    assert_eq!(fixture.device.metrics().connections.get(), 0);
    fixture.driver = Driver::new(fixture.driver.view.clone());
    fixture.driver.offer_all_rx_buffers();
    fixture.activate(EVENT_IDX);
    let (mut client, link) = fixture.connected_client();
    fixture.driver.send_data(link, b"again");
    let mut received = [0; 5];
    client.read_exact(&mut received).unwrap();
    assert_eq!(&received, b"again");
}

#[test]
fn receive_buffers_in_unplugged_memory_are_returned_without_loss() {
    let mut fixture = Fixture::idle(VsockPorts::new());
    let driver = &mut fixture.driver;
    driver.offer_rx(0, UNPLUGGED, 4096);
    driver.offer_rx(1, UNPLUGGED - 100, 4096);
    driver.offer_rx(2, u64::MAX - 10, 4096);
    // The first buffer has no room for a header, and the second has no room for payload.
    driver.offer_rx(3, MIB, 43);
    driver.offer_rx(4, MIB, 44);
    driver.offer_rx_buffer(5);
    fixture.activate(EVENT_IDX);
    let mut client = fixture.client();
    for head in 0..5 {
        assert_eq!(fixture.driver.wait(Driver::try_receive_raw), (head, 0));
    }
    let link = fixture.accept();
    assert_eq!(fixture.device.metrics().bad_buffers_total.get(), 5);
    assert_eq!(read_line(&mut client), format!("OK {}\n", link.host.0));
    drop(client);
    fixture.expect_host_left(link);
}

#[test]
fn packets_in_unplugged_memory_are_returned_and_the_device_continues() {
    let mut fixture = Fixture::new(EVENT_IDX);
    let (mut client, link) = fixture.connected_client();
    let bad_buffers = fixture.device.metrics();
    let table = fixture.driver.tx_table();
    let driver = &mut fixture.driver;
    let mut bad = 0;
    let head = driver.take_tx_head();
    let mut offer_bad = |driver: &mut Driver| {
        driver.offer_tx(head);
        driver.wait_tx(head);
        bad += 1;
        assert_eq!(bad_buffers.bad_buffers_total.get(), bad);
    };
    // These chains use, in order: unplugged memory, memory that ends within the packet, an empty
    // packet, a loop, a descriptor outside of the table, and more descriptors than any packet
    // needs.
    driver.descriptor(table, head, UNPLUGGED, 100, 0, 0);
    offer_bad(driver);
    driver.descriptor(table, head, UNPLUGGED - 43, 44, 0, 0);
    offer_bad(driver);
    driver.descriptor(table, head, MIB, 0, 0, 0);
    offer_bad(driver);
    driver.descriptor(table, head, MIB, 0, 1, head);
    offer_bad(driver);
    driver.descriptor(table, head, MIB, 10, 1, QUEUE_SIZE);
    offer_bad(driver);
    let (indirect, entries) = (15 * MIB, 100);
    (0..entries).for_each(|index| driver.descriptor(indirect, index, MIB, 1, 1, index + 1));
    driver.descriptor(table, head, indirect, u64::from(entries) * 16, 4, 0);
    offer_bad(driver);
    driver.send_data(link, b"fine");
    let mut received = [0; 4];
    client.read_exact(&mut received).unwrap();
    assert_eq!(&received, b"fine");
}

#[test]
fn invalid_ring_stops_the_device_until_the_reset() {
    let mut fixture = Fixture::new(FEATURES);
    let (mut client, _) = fixture.connected_client();
    fixture.driver.offer_absurdly_many();
    // Only the counter shows that the worker has stopped.
    let metrics = fixture.device.metrics();
    let deadline = Instant::now() + Duration::from_secs(30);
    while metrics.broken_queues_total.get() == 0 {
        assert!(Instant::now() < deadline, "the device did not reject the ring");
        thread::yield_now();
    }
    fixture.device.reset();
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    fixture.driver = Driver::new(fixture.driver.view.clone());
    fixture.driver.offer_all_rx_buffers();
    fixture.activate(FEATURES);
    fixture.connected_client();
}

#[test]
fn timer_ends_expired_connections() {
    let mut fixture = Fixture::idle(VsockPorts::new());
    fixture.device.greeting_timeout = Duration::from_millis(20);
    fixture.activate(FEATURES);
    for _ in 0..3 {
        let mut client = UnixStream::connect(fixture.path("")).unwrap();
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
    }
    assert_eq!(fixture.device.metrics().expired_total.get(), 3);
}

#[test]
fn error_of_a_missing_queue_names_it() {
    let mut fixture = Fixture::idle(VsockPorts::new());
    let mut activation = fixture.driver.activation(FEATURES);
    activation.queues[1] = None;
    let error = fixture.device.activate(activation).unwrap_err();
    assert!(matches!(error, ActivateError::QueueMissing { index: 1 }));
    let mut activation = fixture.driver.activation(FEATURES);
    activation.queues[2] = None;
    fixture.device.activate(activation).unwrap();
}

#[test]
fn configuration_is_the_context_id() {
    let fixture = Fixture::idle(VsockPorts::new());
    let mut config = [9; 10];
    fixture.device.read_config(0, &mut config);
    assert_eq!(config, [3, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    fixture.device.read_config(1, &mut config[..2]);
    assert_eq!(config[..2], [0, 0]);
    assert_eq!(fixture.device.device_type(), 19);
}

#[test]
fn reserved_context_ids_are_refused_without_side_effects() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vsock");
    for cid in [0, 1, 2, u32::MAX] {
        let result = VsockDevice::new(cid, &path, VsockPorts::new());
        assert!(matches!(result, Err(VsockError::InvalidCid { cid: named }) if named == cid));
        assert!(!path.exists());
    }
}

#[test]
fn dropped_active_device_closes_connections_and_removes_its_socket() {
    let mut fixture = Fixture::new(FEATURES);
    let (mut client, _) = fixture.connected_client();
    let path = fixture.path("");
    let Fixture { device, driver: _driver, dir: _dir } = fixture;
    drop(device);
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    let error = UnixStream::connect(&path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}
