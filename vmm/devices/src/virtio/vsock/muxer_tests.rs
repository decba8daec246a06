use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixListener;

use proptest::prelude::*;
use tempfile::TempDir;
use tokio::sync::mpsc;
use zerocopy::FromBytes;

use super::*;
use crate::virtio::vsock::connection::{BUFFER_BYTES, CLOSE_TIMEOUT, REQUEST_TIMEOUT};
use crate::virtio::vsock::host::{GuestPorts, VsockPorts};
use crate::virtio::vsock::packet::tests::{from_guest, parse_by_guest};
use crate::virtio::vsock::packet::{Ended, HEADER_LEN};

#[path = "muxer_limits_tests.rs"]
mod limits;

const CID: u64 = 3;
const AGENT: u32 = 1024;
const TRUSTED: u32 = 1025;
const BOTH: Ended = Ended { receiving: true, sending: true };
const SENDING: Ended = Ended { receiving: false, sending: true };
const RECEIVING: Ended = Ended { receiving: true, sending: false };

/// Replacement for epoll. Tests poll the sockets instead.
#[derive(Default)]
struct Watched(HashMap<Token, RawFd>);

impl Watch for Watched {
    fn watch(&mut self, stream: &UnixStream, token: Token) -> io::Result<()> {
        assert!(self.0.insert(token, stream.as_raw_fd()).is_none(), "watched twice");
        Ok(())
    }

    fn unwatch(&mut self, stream: &UnixStream) {
        let before = self.0.len();
        self.0.retain(|_, fd| *fd != stream.as_raw_fd());
        assert_eq!(self.0.len() + 1, before, "only watched sockets can be unwatched");
    }
}

fn readiness_of(fd: RawFd) -> Readiness {
    let mut poll =
        libc::pollfd { fd, events: libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP, revents: 0 };
    // SAFETY: one pollfd is passed, which outlives the call.
    assert!(unsafe { libc::poll(&raw mut poll, 1, 0) } >= 0);
    Readiness {
        readable: poll.revents & (libc::POLLIN | libc::POLLRDHUP | libc::POLLERR) != 0,
        writable: poll.revents & (libc::POLLOUT | libc::POLLERR) != 0,
        hung_up: poll.revents & libc::POLLHUP != 0,
    }
}

struct Fixture {
    dir: TempDir,
    muxer: Muxer,
    metrics: Arc<VsockMetrics>,
    agent: mpsc::Receiver<UnixStream>,
    trusted: mpsc::Receiver<UnixStream>,
    watch: Watched,
    now: Instant,
    /// Credit to announce in packets from the guest.
    credit: Credit,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut ports = VsockPorts::new();
        let agent = ports.listen_in_process(AGENT, GuestPorts::All).unwrap();
        let trusted = ports.listen_in_process(TRUSTED, GuestPorts::Privileged).unwrap();
        let host = Arc::new(HostSide::bind(&dir.path().join("vsock"), ports).unwrap());
        let metrics = Arc::<VsockMetrics>::default();
        Self {
            dir,
            muxer: Muxer::new(CID, host, Arc::clone(&metrics), GREETING_TIMEOUT, MAX_SOCKETS),
            metrics,
            agent,
            trusted,
            watch: Watched::default(),
            now: Instant::now(),
            credit: Credit { buf_alloc: 1 << 20, fwd_cnt: 0 },
        }
    }

    fn listen(&self, port: u32) -> UnixListener {
        let listener = UnixListener::bind(self.dir.path().join(format!("vsock_{port}"))).unwrap();
        listener.set_nonblocking(true).unwrap();
        listener
    }

    fn client(&self) -> UnixStream {
        let client = UnixStream::connect(self.dir.path().join("vsock")).unwrap();
        client.set_nonblocking(true).unwrap();
        client
    }

    /// Handles all pending events of the sockets, as an event loop does.
    fn poll(&mut self) {
        self.muxer.accept(&mut self.watch, self.now).unwrap();
        let sockets: Vec<_> = self.watch.0.iter().map(|(token, fd)| (*token, *fd)).collect();
        for (token, fd) in sockets {
            self.muxer.on_socket(token, readiness_of(fd), &mut self.watch, self.now);
        }
    }

    fn guest_sends_raw(&mut self, header: &RawHeader, mut payload: &[u8]) {
        let len = payload.len();
        self.muxer.on_guest_packet(header, &mut payload, len, &mut self.watch, self.now);
        self.muxer.connect(&mut self.watch, self.now);
    }

    fn guest_sends(&mut self, link: Link, op: Op, payload: &[u8]) {
        let header = from_guest(CID, link, op, self.credit);
        self.guest_sends_raw(&header, payload);
    }

    fn guest_sends_data(&mut self, link: Link, payload: &[u8]) {
        self.guest_sends(link, Op::Data { len_bytes: u32_of(payload.len()) }, payload);
    }

    fn guest_receives(&mut self) -> Option<(GuestPacket, Vec<u8>)> {
        self.poll();
        let packet = self.muxer.next_packet(4096, &mut self.watch, self.now)?;
        let header = packet.header;
        assert_eq!((header.src_cid.get(), header.dst_cid.get()), (2, CID));
        assert_eq!(header.len.get() as usize, packet.payload.len());
        Some((parse_by_guest(&header), packet.payload.to_vec()))
    }

    #[track_caller]
    fn guest_expects(&mut self, link: Link, op: Op) -> Credit {
        let (packet, _) = self.guest_receives().expect("a packet for the guest");
        assert_eq!((packet.link, packet.op), (link, op));
        packet.credit
    }

    #[track_caller]
    fn guest_expects_data(&mut self, link: Link, expected: &[u8]) {
        let (packet, payload) = self.guest_receives().expect("a packet for the guest");
        assert_eq!(packet.link, link);
        assert_eq!(payload, expected);
    }

    #[track_caller]
    fn guest_expects_nothing(&mut self) {
        assert!(self.guest_receives().is_none_or(|packet| panic!("unexpected {packet:?}")));
    }

    /// Creates a connection from a client on the host to port 52 of the guest.
    #[track_caller]
    fn connected_client(&mut self) -> (UnixStream, Link) {
        let mut client = self.client();
        client.write_all(b"CONNECT 52\n").unwrap();
        let (packet, _) = self.guest_receives().expect("a request for the guest");
        assert_eq!((packet.op, packet.link.guest), (Op::Request, GuestPort(52)));
        self.guest_sends(packet.link, Op::Response, &[]);
        assert_eq!(read_some(&mut client), format!("OK {}\n", packet.link.host.0).into_bytes());
        (client, packet.link)
    }

    /// Creates a connection from the guest to a server on port 80 of the host.
    #[track_caller]
    fn connected_server(&mut self) -> (UnixStream, Link) {
        let listener = self.listen(80);
        let link = Link { host: HostPort(80), guest: GuestPort(1000) };
        self.guest_sends(link, Op::Request, &[]);
        let (server, _) = listener.accept().unwrap();
        server.set_nonblocking(true).unwrap();
        self.guest_expects(link, Op::Response);
        (server, link)
    }
}

/// Reads the available data. Returns no data at the end of the stream.
#[track_caller]
fn read_some(stream: &mut UnixStream) -> Vec<u8> {
    let mut buffer = vec![0; 1 << 20];
    let len = stream.read(&mut buffer).expect("something to read");
    buffer.truncate(len);
    buffer
}

#[track_caller]
fn assert_waits(stream: &mut UnixStream) {
    let error = stream.read(&mut [0]).expect_err("nothing to read");
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
}

#[test]
fn client_of_the_host_reaches_the_guest() {
    let mut fixture = Fixture::new();
    let (mut client, link) = fixture.connected_client();
    client.write_all(b"ping").unwrap();
    fixture.guest_expects_data(link, b"ping");
    fixture.guest_sends_data(link, b"pong");
    assert_eq!(read_some(&mut client), b"pong");
    fixture.guest_expects_nothing();
    assert_eq!(fixture.metrics.connections.get(), 1);
    assert_eq!(fixture.metrics.connections_total.get(), 1);
    assert_eq!(fixture.metrics.bytes_from_guest_total.get(), 4);
    assert_eq!(fixture.metrics.bytes_to_guest_total.get(), 4);
}

#[test]
fn data_right_after_the_greeting_is_not_lost() {
    let mut fixture = Fixture::new();
    let mut client = fixture.client();
    client.write_all(b"CONNECT 52\nhello").unwrap();
    drop(client);
    let (packet, _) = fixture.guest_receives().unwrap();
    fixture.guest_sends(packet.link, Op::Response, &[]);
    let (data, payload) = fixture.guest_receives().unwrap();
    assert_eq!((data.link, payload.as_slice()), (packet.link, &b"hello"[..]));
    fixture.guest_expects(packet.link, Op::Shutdown(BOTH));
}

#[test]
fn refused_client_is_closed_without_ok() {
    let mut fixture = Fixture::new();
    let mut client = fixture.client();
    client.write_all(b"CONNECT 52\n").unwrap();
    let (packet, _) = fixture.guest_receives().unwrap();
    assert_waits(&mut client);
    fixture.guest_sends(packet.link, Op::Reset, &[]);
    assert_eq!(read_some(&mut client), b"");
    assert_eq!(fixture.metrics.rejected_total.get(), 1);
    assert_eq!(fixture.metrics.connections.get(), 0);
    fixture.guest_expects_nothing();
}

#[test]
fn client_without_a_greeting_is_closed_in_time() {
    let mut fixture = Fixture::new();
    let mut client = fixture.client();
    client.write_all(b"GET / HTTP/1.1\n").unwrap();
    fixture.guest_expects_nothing();
    assert!(!matches!(client.read(&mut [0]), Ok(1..)));
    let mut silent = fixture.client();
    fixture.guest_expects_nothing();
    assert_waits(&mut silent);
    fixture.now += GREETING_TIMEOUT;
    assert!(fixture.muxer.next_deadline().unwrap() <= fixture.now);
    fixture.muxer.expire(&mut fixture.watch, fixture.now);
    assert_eq!(read_some(&mut silent), b"");
    assert_eq!(fixture.muxer.next_deadline(), None);
    assert!(fixture.watch.0.is_empty());
}

#[test]
fn unanswered_request_is_reset() {
    let mut fixture = Fixture::new();
    let mut client = fixture.client();
    client.write_all(b"CONNECT 52\n").unwrap();
    let (packet, _) = fixture.guest_receives().unwrap();
    assert_eq!(fixture.muxer.next_deadline(), Some(fixture.now + REQUEST_TIMEOUT));
    fixture.now += REQUEST_TIMEOUT;
    fixture.muxer.expire(&mut fixture.watch, fixture.now);
    assert_eq!(read_some(&mut client), b"");
    fixture.guest_expects(packet.link, Op::Reset);
    // The answer arrives too late and does not belong to any connection.
    fixture.guest_sends(packet.link, Op::Response, &[]);
    fixture.guest_expects(packet.link, Op::Reset);
    assert_eq!(fixture.metrics.expired_total.get(), 1);
}

#[test]
fn guest_reaches_a_server_of_the_host() {
    let mut fixture = Fixture::new();
    let (mut server, link) = fixture.connected_server();
    fixture.guest_sends_data(link, b"ping");
    assert_eq!(read_some(&mut server), b"ping");
    server.write_all(b"pong").unwrap();
    fixture.guest_expects_data(link, b"pong");
}

#[test]
fn port_without_a_listener_refuses_the_guest() {
    let mut fixture = Fixture::new();
    let link = Link { host: HostPort(81), guest: GuestPort(1000) };
    fixture.guest_sends(link, Op::Request, &[]);
    fixture.guest_expects(link, Op::Reset);
    assert_eq!(fixture.metrics.rejected_total.get(), 1);
}

#[test]
fn guest_reaches_a_port_in_this_process() {
    let mut fixture = Fixture::new();
    let link = Link { host: HostPort(AGENT), guest: GuestPort(1000) };
    fixture.guest_sends(link, Op::Request, &[]);
    fixture.guest_expects(link, Op::Response);
    let mut governor = fixture.agent.try_recv().unwrap();
    fixture.guest_sends_data(link, b"report");
    assert_eq!(read_some(&mut governor), b"report");
    governor.write_all(b"ack").unwrap();
    fixture.guest_expects_data(link, b"ack");

    drop(fixture.agent);
    let (_, agent) = mpsc::channel(1);
    fixture.agent = agent;
    let second = Link { guest: GuestPort(1001), ..link };
    fixture.guest_sends(second, Op::Request, &[]);
    fixture.guest_expects(second, Op::Reset);
}

#[test]
fn guest_that_ends_sending_still_receives() {
    let mut fixture = Fixture::new();
    let (mut server, link) = fixture.connected_server();
    fixture.guest_sends_data(link, b"question");
    fixture.guest_sends(link, Op::Shutdown(SENDING), &[]);
    assert_eq!(read_some(&mut server), b"question");
    assert_eq!(read_some(&mut server), b"");
    server.write_all(b"answer").unwrap();
    drop(server);
    fixture.guest_expects_data(link, b"answer");
    fixture.guest_expects(link, Op::Shutdown(BOTH));
    fixture.guest_sends(link, Op::Reset, &[]);
    assert_eq!(fixture.metrics.connections.get(), 0);
    fixture.guest_expects_nothing();
}

#[test]
fn host_that_ends_sending_still_receives() {
    let mut fixture = Fixture::new();
    let (mut client, link) = fixture.connected_client();
    client.write_all(b"question").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    fixture.guest_expects_data(link, b"question");
    fixture.guest_expects(link, Op::Shutdown(SENDING));
    fixture.guest_expects_nothing();
    assert_eq!(fixture.muxer.next_deadline(), None);
    fixture.guest_sends_data(link, b"answer");
    assert_eq!(read_some(&mut client), b"answer");
    fixture.guest_sends(link, Op::Shutdown(BOTH), &[]);
    assert_eq!(read_some(&mut client), b"");
    fixture.guest_expects(link, Op::Reset);
    assert_eq!(fixture.metrics.connections.get(), 0);
}

#[test]
fn write_to_a_guest_that_has_ended_receiving_fails() {
    let mut fixture = Fixture::new();
    let (mut client, link) = fixture.connected_client();
    fixture.guest_sends(link, Op::Shutdown(RECEIVING), &[]);
    assert_eq!(client.write(b"x").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    fixture.guest_sends_data(link, b"still talking");
    assert_eq!(read_some(&mut client), b"still talking");
}

#[test]
fn host_that_leaves_is_reported_and_removed_in_time() {
    let mut fixture = Fixture::new();
    let (mut client, link) = fixture.connected_client();
    client.write_all(b"last words").unwrap();
    drop(client);
    fixture.guest_expects_data(link, b"last words");
    fixture.guest_expects(link, Op::Shutdown(BOTH));
    // Data from the guest that is still in flight is accepted and discarded.
    fixture.guest_sends_data(link, &[1; 5000]);
    fixture.guest_expects_nothing();
    assert_eq!(fixture.muxer.next_deadline(), Some(fixture.now + CLOSE_TIMEOUT));
    fixture.now += CLOSE_TIMEOUT;
    fixture.muxer.expire(&mut fixture.watch, fixture.now);
    fixture.guest_expects(link, Op::Reset);
    assert!(fixture.watch.0.is_empty());
}

#[test]
fn host_that_leaves_without_reading_resets_the_connection() {
    let mut fixture = Fixture::new();
    let (client, link) = fixture.connected_client();
    fixture.guest_sends_data(link, b"unheard");
    drop(client);
    fixture.guest_expects(link, Op::Reset);
    assert_eq!(fixture.metrics.connections.get(), 0);
}

#[test]
fn reset_by_the_guest_ends_the_stream_of_the_host() {
    let mut fixture = Fixture::new();
    let (mut client, link) = fixture.connected_client();
    fixture.guest_sends_data(link, b"last words");
    fixture.guest_sends(link, Op::Reset, &[]);
    assert_eq!(read_some(&mut client), b"last words");
    assert_eq!(read_some(&mut client), b"");
    fixture.guest_expects_nothing();
    assert!(fixture.watch.0.is_empty());
}

#[test]
fn guest_without_credit_receives_nothing_until_it_has_some() {
    let mut fixture = Fixture::new();
    fixture.credit = Credit { buf_alloc: 10, fwd_cnt: 0 };
    let (mut client, link) = fixture.connected_client();
    client.write_all(b"0123456789abcdef").unwrap();
    fixture.guest_expects_data(link, b"0123456789");
    fixture.guest_expects(link, Op::CreditRequest);
    fixture.guest_expects_nothing();
    fixture.guest_sends(link, Op::CreditUpdate, &[]);
    fixture.guest_expects_nothing();
    fixture.credit.fwd_cnt = 4;
    fixture.guest_sends(link, Op::CreditUpdate, &[]);
    fixture.guest_expects_data(link, b"abcd");
    fixture.credit.fwd_cnt = 14;
    fixture.guest_sends(link, Op::CreditUpdate, &[]);
    fixture.guest_expects_data(link, b"ef");
}

/// Sends data from the guest until the host's socket and the VMM's buffer are full. Returns the
/// number of bytes sent.
fn stuff(fixture: &mut Fixture, link: Link, forwarded: &mut u32) -> u32 {
    let (mut sent, chunk) = (0, vec![7; 4096]);
    while sent - *forwarded + u32_of(chunk.len()) <= BUFFER_BYTES {
        fixture.guest_sends_data(link, &chunk);
        sent += u32_of(chunk.len());
        while let Some((packet, _)) = fixture.guest_receives() {
            assert_eq!(packet.op, Op::CreditUpdate);
            *forwarded = packet.credit.fwd_cnt;
        }
    }
    sent
}

#[test]
fn overrun_resets_the_connection() {
    let mut fixture = Fixture::new();
    let (mut client, link) = fixture.connected_client();
    let mut forwarded = 0;
    stuff(&mut fixture, link, &mut forwarded);
    fixture.guest_sends_data(link, &vec![0; BUFFER_BYTES as usize]);
    fixture.guest_expects(link, Op::Reset);
    assert_eq!(fixture.metrics.violations_total.get(), 1);
    while !read_some(&mut client).is_empty() {}
}

#[test]
fn packet_shorter_than_the_length_in_its_header_resets_the_connection() {
    let mut fixture = Fixture::new();
    let (_client, link) = fixture.connected_client();
    fixture.guest_sends(link, Op::Data { len_bytes: 100 }, b"only this");
    fixture.guest_expects(link, Op::Reset);
    assert_eq!(fixture.metrics.bad_buffers_total.get(), 1);
    assert_eq!(fixture.metrics.connections.get(), 0);
}

#[test]
fn packets_without_a_connection_are_reset_or_ignored() {
    let mut fixture = Fixture::new();
    let link = Link { host: HostPort(5), guest: GuestPort(6) };
    for op in [Op::Response, Op::Shutdown(BOTH), Op::CreditUpdate, Op::CreditRequest] {
        fixture.guest_sends(link, op, &[]);
        fixture.guest_expects(link, Op::Reset);
    }
    fixture.guest_sends(link, Op::Reset, &[]);
    fixture.guest_expects_nothing();

    let good = from_guest(CID, link, Op::Request, fixture.credit);
    fixture.guest_sends_raw(&RawHeader { socket_type: 2.into(), ..good }, &[]);
    fixture.guest_expects(link, Op::Reset);
    fixture.guest_sends_raw(&RawHeader { op: 99.into(), ..good }, &[]);
    fixture.guest_expects(link, Op::Reset);
    fixture.guest_sends_raw(&RawHeader { src_cid: 4.into(), ..good }, &[]);
    fixture.guest_sends_raw(&RawHeader { dst_cid: 4.into(), ..good }, &[]);
    fixture.guest_expects_nothing();
    assert_eq!(fixture.metrics.dropped_total.get(), 2);
}

#[test]
fn unknown_operation_ends_its_connection_on_both_sides() {
    let mut fixture = Fixture::new();
    let (mut client, link) = fixture.connected_client();
    let good = from_guest(CID, link, Op::CreditUpdate, fixture.credit);
    fixture.guest_sends_raw(&RawHeader { op: 99.into(), ..good }, &[]);
    fixture.guest_expects(link, Op::Reset);
    assert_eq!(read_some(&mut client), b"");
}

#[test]
fn second_request_on_the_same_ports_ends_the_first() {
    let mut fixture = Fixture::new();
    let (mut server, link) = fixture.connected_server();
    fixture.guest_sends(link, Op::Request, &[]);
    fixture.guest_expects(link, Op::Reset);
    assert_eq!(read_some(&mut server), b"");
}

#[test]
fn unprivileged_port_does_not_reach_a_privileged_listener() {
    let mut fixture = Fixture::new();
    let link = Link { host: HostPort(TRUSTED), guest: GuestPort(1024) };
    fixture.guest_sends(link, Op::Request, &[]);
    fixture.guest_expects(link, Op::Reset);
    assert_eq!(fixture.metrics.rejected_total.get(), 1);
    assert!(fixture.trusted.try_recv().is_err());
    let link = Link { guest: GuestPort(1023), ..link };
    fixture.guest_sends(link, Op::Request, &[]);
    fixture.guest_expects(link, Op::Response);
    fixture.trusted.try_recv().unwrap();
    assert_eq!(fixture.metrics.rejected_total.get(), 1);
}

#[test]
fn connections_are_served_in_turn() {
    let mut fixture = Fixture::new();
    let (mut first, one) = fixture.connected_client();
    let (mut second, two) = fixture.connected_client();
    first.write_all(&[1; 3 * 4096]).unwrap();
    second.write_all(&[2; 3 * 4096]).unwrap();
    let order: Vec<_> = (0..6).map(|_| fixture.guest_receives().unwrap().0.link).collect();
    assert_eq!(order[0], order[2]);
    assert_eq!(order[1], order[3]);
    assert!(order.contains(&one) && order.contains(&two));
}

#[derive(Clone, Debug)]
enum Act {
    Client(Vec<u8>),
    ClientWrites(usize, Vec<u8>),
    ClientReads(usize),
    ClientLeaves(usize),
    ClientEnds(usize),
    Guest { bytes: [u8; HEADER_LEN], valid: u8, link: usize, payload: usize },
    GuestReceives(u8),
    Time(u64),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let small = || prop::collection::vec(any::<u8>(), 0..200);
    let act = prop_oneof![
        Just(Act::Client(b"CONNECT 52\n".to_vec())),
        small().prop_map(Act::Client),
        (any::<usize>(), small()).prop_map(|(n, bytes)| Act::ClientWrites(n, bytes)),
        any::<usize>().prop_map(Act::ClientReads),
        any::<usize>().prop_map(Act::ClientLeaves),
        any::<usize>().prop_map(Act::ClientEnds),
        (any::<[u8; HEADER_LEN]>(), any::<u8>(), any::<usize>(), 0usize..70_000)
            .prop_map(|(bytes, valid, link, payload)| Act::Guest { bytes, valid, link, payload }),
        (any::<[u8; HEADER_LEN]>(), Just(1), any::<usize>(), 0usize..70_000)
            .prop_map(|(bytes, valid, link, payload)| Act::Guest { bytes, valid, link, payload }),
        any::<u8>().prop_map(Act::GuestReceives),
        (0u64..9).prop_map(Act::Time),
    ];
    prop::collection::vec(act, 1..120)
}

/// Generates packets that are almost valid: with the guest's addresses, known operations and ports
/// in use.
fn plausible(raw: &RawHeader, links: &[Link], pick: usize, payload: usize) -> RawHeader {
    let agent = Link { host: HostPort(AGENT), guest: GuestPort(raw.src_port.get() % 8) };
    let link = match links.len() {
        0 => agent,
        _ if pick.is_multiple_of(3) => agent,
        n => links[pick % n],
    };
    let credit = Credit { buf_alloc: raw.buf_alloc.get(), fwd_cnt: raw.fwd_cnt.get() % (1 << 17) };
    let header = from_guest(CID, link, Op::Data { len_bytes: u32_of(payload) }, credit);
    RawHeader { op: (raw.op.get() % 9).into(), flags: raw.flags, ..header }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn arbitrary_actions_cause_neither_panic_nor_growth(acts in acts()) {
        let mut fixture = Fixture::new();
        let mut clients: Vec<UnixStream> = Vec::new();
        let mut links: Vec<Link> = Vec::new();
        let zeros = vec![0; 70_000];
        for act in acts {
            let count = clients.len().max(1);
            match act {
                Act::Client(greeting) => {
                    let mut client = fixture.client();
                    client.write_all(&greeting).unwrap();
                    clients.push(client);
                }
                Act::ClientWrites(n, bytes) => {
                    if let Some(client) = clients.get_mut(n % count) {
                        let _ = client.write(&bytes);
                    }
                }
                Act::ClientReads(n) => {
                    if let Some(client) = clients.get_mut(n % count) {
                        let _ = client.read(&mut [0; 4096]);
                    }
                }
                Act::ClientLeaves(n) => {
                    if !clients.is_empty() {
                        clients.swap_remove(n % count);
                    }
                }
                Act::ClientEnds(n) => {
                    if let Some(client) = clients.get(n % count) {
                        let _ = client.shutdown(Shutdown::Write);
                    }
                }
                Act::Guest { bytes, valid, link, payload } => {
                    let raw = RawHeader::read_from_bytes(&bytes).unwrap();
                    let header = if valid == 0 { raw } else { plausible(&raw, &links, link, payload) };
                    fixture.guest_sends_raw(&header, &zeros[..payload]);
                }
                Act::GuestReceives(count) => {
                    for _ in 0..count {
                        let Some((packet, _)) = fixture.guest_receives() else { break };
                        links.push(packet.link);
                    }
                }
                Act::Time(seconds) => {
                    fixture.now += Duration::from_secs(seconds);
                    fixture.muxer.expire(&mut fixture.watch, fixture.now);
                    clients.extend(fixture.agent.try_recv());
                }
            }
            fixture.poll();
            fixture.check();
        }
    }
}

impl Fixture {
    /// Checks the invariants of the muxer's tables.
    fn check(&self) {
        let muxer = &self.muxer;
        assert_eq!(muxer.sockets.len(), self.watch.0.len());
        assert_eq!(muxer.sockets.len() as u64, self.metrics.connections.get());
        assert!(muxer.sockets.len() <= MAX_SOCKETS);
        assert!(muxer.resets.len() <= MAX_RESETS);
        for (link, token) in &muxer.links {
            assert!(
                matches!(&muxer.sockets[token].role, Role::Joined(joined) if joined.link == *link)
            );
        }
        let joined = muxer.sockets.values().filter(|socket| matches!(socket.role, Role::Joined(_)));
        assert_eq!(joined.count(), muxer.links.len());
        for (token, socket) in &muxer.sockets {
            let times = muxer.ready.iter().filter(|ready| *ready == token).count();
            assert_eq!(times, usize::from(socket.queued));
            if let Role::Joined(joined) = &socket.role {
                assert_eq!(joined.unsent.len(), joined.connection.unforwarded_bytes() as usize);
                assert!(joined.unsent.len() <= BUFFER_BYTES as usize);
            }
        }
        assert!(muxer.ready.iter().all(|token| muxer.sockets.contains_key(token)));
    }
}
