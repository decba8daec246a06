//! Multiplexer between the queues and the sockets. The multiplexer maps connections to sockets and
//! lets the sockets send to the guest in turn.
//!
//! Sockets are watched edge-triggered. A socket is `readable` from the time when epoll reports it
//! until a read finds no data. Payload from the host remains in the socket until the guest has both
//! a buffer in its queue and credit. Payload from the guest is accepted immediately, up to the
//! guest's credit, and waits in `unsent` if the socket is full.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::debug;

use crate::log::rate_limited;

use super::connection::{Connection, Event, Next};
use super::host::{Greeting, GreetingResult, HostSide};
use super::metrics::VsockMetrics;
use super::packet::{Credit, GuestPacket, GuestPort, HostPort, Link, Op, RawHeader};

/// Maximum number of sockets in any state. It limits the number of file descriptors, and the memory
/// for buffers of [`BUFFER_BYTES`] each.
///
/// [`BUFFER_BYTES`]: super::connection::BUFFER_BYTES
pub(super) const MAX_SOCKETS: usize = 1023;

/// Returns the maximum number of sockets in a process that may have `open_files` open files. Only
/// half of the files are used, because the rest of the VMM needs files as well, and a guest must
/// not exhaust them.
pub(super) fn max_sockets(open_files: u64) -> usize {
    usize::try_from(open_files / 2).map_or(MAX_SOCKETS, |half| half.min(MAX_SOCKETS))
}

/// Maximum number of pending resets. Further resets are dropped until the guest has received some.
const MAX_RESETS: usize = 1024;

/// Time limit for a client's first line, which a user may type by hand.
pub(super) const GREETING_TIMEOUT: Duration = Duration::from_secs(60);

/// Time limit for the host to read at least some of the remaining data of a closed connection. Each
/// read restarts it. Without a limit, a guest could occupy all sockets with closed connections.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);

/// The maximum number of sockets divided by this number, but at most [`MAX_OWN_SOCKETS`], is
/// reserved for ports on which the VMM itself listens. The agent can therefore connect even if a
/// program in the guest has occupied all other sockets.
const OWN_PART: usize = 8;
const MAX_OWN_SOCKETS: usize = 8;

/// Maximum payload that is copied in one step: Linux's largest packet.
const CHUNK_BYTES: usize = 64 * 1024;

/// Host ports that are assigned to clients, as in Firecracker. They are far from ports with
/// listeners.
const CLIENT_PORTS: std::ops::Range<u32> = 1 << 30..1 << 31;

/// Identifies a socket in epoll. The worker's own events have tokens below [`Token::FIRST`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Token(pub u32);

impl Token {
    /// First token of a socket.
    pub(super) const FIRST: u32 = 16;
}

/// Watches sockets edge-triggered and reports when they become readable, writable or hung up.
pub(super) trait Watch {
    fn watch(&mut self, stream: &UnixStream, token: Token) -> io::Result<()>;
    /// Stops watching a socket. Must be called before the socket is closed.
    fn unwatch(&mut self, stream: &UnixStream);
}

/// Events of a socket.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Readiness {
    /// Data, the end of the stream, or an error can be read.
    pub readable: bool,
    /// The socket has space for writes, or an error is pending.
    pub writable: bool,
    /// The peer has left: writes fail, but data may remain to be read.
    pub hung_up: bool,
}

#[derive(Debug)]
pub(super) struct Packet<'a> {
    pub header: RawHeader,
    pub payload: &'a [u8],
}

struct Socket {
    stream: UnixStream,
    role: Role,
    /// The socket may have data to read.
    readable: bool,
    /// The socket is in `ready`.
    queued: bool,
}

enum Role {
    /// A client that has not yet requested a port.
    Greeting { greeting: Greeting, deadline: Instant },
    /// The host's end of a connection.
    Joined(Joined),
    /// The guest has closed the connection, but the host has not read the remaining data yet.
    Draining { unsent: VecDeque<u8>, deadline: Instant },
}

struct Joined {
    link: Link,
    connection: Connection,
    /// Data from the guest that was neither forwarded nor discarded yet.
    unsent: VecDeque<u8>,
    /// True if the host receives no more data.
    write_failed: bool,
    /// For sending and receiving: true if the host was notified that the guest has ended this
    /// direction.
    notified_host: (bool, bool),
}

impl Joined {
    fn new(link: Link, connection: Connection) -> Self {
        let (unsent, notified_host) = (VecDeque::new(), (false, false));
        Self { link, connection, unsent, write_failed: false, notified_host }
    }

    /// Discards data that the host will never receive.
    fn fail_writes(&mut self, now: Instant) {
        if !self.write_failed {
            self.write_failed = true;
            self.unsent = VecDeque::new();
            self.connection.forwarded(self.connection.unforwarded_bytes());
            self.connection.host_ended_receiving(now);
        }
    }

    /// Forwards `data`. Data that does not fit into the socket waits in `unsent`.
    fn send(&mut self, mut stream: &UnixStream, mut data: &[u8], now: Instant) {
        while !self.write_failed && self.unsent.is_empty() && !data.is_empty() {
            match stream.write(data) {
                Ok(written) => {
                    self.connection.forwarded(u32_of(written));
                    data = &data[written..];
                }
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => self.fail_writes(now),
            }
        }
        if self.write_failed {
            // This data was discarded when the write failed, or arrived after that.
            self.connection.forwarded(self.connection.unforwarded_bytes());
        } else {
            self.unsent.extend(data);
        }
    }

    fn flush(&mut self, stream: &UnixStream, now: Instant) {
        match flush(stream, &mut self.unsent) {
            Ok(written) => self.connection.forwarded(u32_of(written)),
            Err(_) => self.fail_writes(now),
        }
    }
}

fn u32_of(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("no more than a buffer of a connection")
}

/// Writes until `unsent` is empty or the socket is full.
fn flush(mut stream: &UnixStream, unsent: &mut VecDeque<u8>) -> io::Result<usize> {
    let mut total = 0;
    while !unsent.is_empty() {
        match stream.write(unsent.as_slices().0) {
            Ok(written) => {
                unsent.drain(..written);
                total += written;
            }
            Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => return Ok(total),
            Err(err) => return Err(err),
        }
    }
    // The memory is freed, because idle connections do not need it.
    *unsent = VecDeque::new();
    Ok(total)
}

/// All connections of a guest, from an activation of the device to the next reset.
pub(super) struct Muxer {
    guest_cid: u64,
    host: Arc<HostSide>,
    metrics: Arc<VsockMetrics>,
    sockets: HashMap<Token, Socket>,
    links: HashMap<Link, Token>,
    /// Sockets that have packets for the guest, each at most once. The sockets are served in turn.
    ready: VecDeque<Token>,
    resets: VecDeque<Link>,
    /// The guest's request to connect that is being handled.
    connect_request: Option<GuestPacket>,
    next_token: u32,
    next_client_port: u32,
    greeting_timeout: Duration,
    max_sockets: usize,
    chunk: Box<[u8]>,
}

impl Muxer {
    /// Creates a muxer without connections. It never opens more than `max_sockets` sockets.
    pub(super) fn new(
        guest_cid: u64,
        host: Arc<HostSide>,
        metrics: Arc<VsockMetrics>,
        greeting_timeout: Duration,
        max_sockets: usize,
    ) -> Self {
        metrics.connections.set(0);
        Self {
            guest_cid,
            host,
            metrics,
            sockets: HashMap::new(),
            links: HashMap::new(),
            ready: VecDeque::new(),
            resets: VecDeque::new(),
            connect_request: None,
            next_token: Token::FIRST,
            next_client_port: CLIENT_PORTS.start,
            greeting_timeout,
            max_sockets,
            chunk: vec![0; CHUNK_BYTES].into_boxed_slice(),
        }
    }

    pub(super) fn host(&self) -> &HostSide {
        &self.host
    }

    /// Accepts waiting clients. Fails if the process has no free file descriptors or memory.
    pub(super) fn accept(&mut self, watch: &mut dyn Watch, now: Instant) -> io::Result<()> {
        while let Some(stream) = self.host.accept()? {
            if !self.has_room(false) {
                debug!("Too many vsock connections; client rejected");
                self.metrics.rejected_total.increment();
                continue;
            }
            let deadline = now + self.greeting_timeout;
            let role = Role::Greeting { greeting: Greeting::default(), deadline };
            self.add(stream, role, watch)?;
        }
        Ok(())
    }

    /// Returns true if one more socket may be added. `is_own` is true for a port on which the VMM
    /// itself listens.
    fn has_room(&self, is_own: bool) -> bool {
        let own = (self.max_sockets / OWN_PART).min(MAX_OWN_SOCKETS);
        let max = if is_own { self.max_sockets } else { self.max_sockets - own };
        self.sockets.len() < max
    }

    fn add(&mut self, stream: UnixStream, role: Role, watch: &mut dyn Watch) -> io::Result<Token> {
        let token = loop {
            let token = Token(self.next_token);
            self.next_token = self.next_token.checked_add(1).unwrap_or(Token::FIRST);
            if !self.sockets.contains_key(&token) {
                break token;
            }
        };
        watch.watch(&stream, token)?;
        self.sockets.insert(token, Socket { stream, role, readable: false, queued: false });
        self.metrics.connections.set(self.sockets.len() as u64);
        Ok(token)
    }

    fn remove(&mut self, token: Token, watch: &mut dyn Watch) {
        let Some(socket) = self.sockets.remove(&token) else { return };
        watch.unwatch(&socket.stream);
        if let Role::Joined(joined) = &socket.role {
            self.links.remove(&joined.link);
        }
        if socket.queued {
            self.ready.retain(|&ready| ready != token);
        }
        self.metrics.connections.set(self.sockets.len() as u64);
    }

    /// Handles events of a socket.
    pub(super) fn on_socket(
        &mut self,
        token: Token,
        ready: Readiness,
        watch: &mut dyn Watch,
        now: Instant,
    ) {
        let Some(socket) = self.sockets.get_mut(&token) else { return };
        socket.readable |= ready.readable || ready.hung_up;
        match &mut socket.role {
            Role::Greeting { greeting, .. } => match greeting.read(&socket.stream) {
                GreetingResult::Incomplete => {}
                GreetingResult::Connect(port) => self.request(token, port, now),
                GreetingResult::Refused => {
                    self.metrics.rejected_total.increment();
                    self.remove(token, watch);
                }
            },
            Role::Joined(joined) => {
                if ready.hung_up {
                    joined.fail_writes(now);
                } else if ready.writable {
                    joined.flush(&socket.stream, now);
                }
            }
            Role::Draining { unsent, deadline } => {
                let before_bytes = unsent.len();
                if ready.hung_up || flush(&socket.stream, unsent).is_err() {
                    unsent.clear();
                } else if unsent.len() < before_bytes {
                    *deadline = now + DRAIN_TIMEOUT;
                }
            }
        }
        self.update_socket(token, watch, now);
    }

    /// Handles a client's request for a port.
    fn request(&mut self, token: Token, guest: GuestPort, now: Instant) {
        let link = loop {
            let host = HostPort(self.next_client_port);
            self.next_client_port += 1;
            if self.next_client_port == CLIENT_PORTS.end {
                self.next_client_port = CLIENT_PORTS.start;
            }
            let link = Link { host, guest };
            if !self.links.contains_key(&link) {
                break link;
            }
        };
        let socket = self.sockets.get_mut(&token).expect("the socket of the greeting");
        socket.role = Role::Joined(Joined::new(link, Connection::requested(now)));
        // Data may have arrived together with the first line. In that case epoll reports no further
        // edge.
        socket.readable = true;
        self.links.insert(link, token);
    }

    /// Processes a packet from the guest. Its buffers contain `payload_bytes` after the header. If
    /// [`Muxer::has_connect_request`] is true afterward, call [`Muxer::connect`] before other
    /// methods.
    pub(super) fn on_guest_packet(
        &mut self,
        header: &RawHeader,
        payload: &mut dyn Read,
        payload_bytes: usize,
        watch: &mut dyn Watch,
        now: Instant,
    ) {
        assert!(
            self.connect_request.is_none(),
            "a connect request of the guest is handled before its next packet"
        );
        self.metrics.packets_from_guest_total.increment();
        if !header.is_to_host_from(self.guest_cid) {
            self.metrics.dropped_total.increment();
            return;
        }
        let packet = match header.parse_guest_packet() {
            Ok(packet) => packet,
            Err(not_understood) => {
                // A packet of unknown type MUST be answered with a reset (virtio 1.3, 5.10.6.4).
                // For the guest, this reset ends a connection with these ports, so it is ended here
                // as well.
                self.metrics.violations_total.increment();
                if let Some(&token) = self.links.get(&not_understood.link) {
                    self.remove(token, watch);
                }
                if !not_understood.is_reset {
                    self.queue_reset(not_understood.link);
                }
                return;
            }
        };
        match (self.links.get(&packet.link).copied(), packet.op) {
            (Some(token), _) => {
                self.on_linked_packet(token, packet, payload, payload_bytes, watch, now)
            }
            (None, Op::Request) => self.connect_request = Some(packet),
            (None, Op::Reset) => {}
            (None, _) => self.queue_reset(packet.link),
        }
    }

    /// Returns true if the last packet was a request to connect to a host port.
    pub(super) fn has_connect_request(&self) -> bool {
        self.connect_request.is_some()
    }

    /// Handles a pending request of the guest to connect. The caller must hold no guard of guest
    /// memory, because resolving the socket's path may wait for a disk.
    pub(super) fn connect(&mut self, watch: &mut dyn Watch, now: Instant) {
        let Some(packet) = self.connect_request.take() else { return };
        let link = packet.link;
        if !self.has_room(self.host.listens_in_process(link.host)) {
            debug!(%link, "Too many vsock connections; connection of the guest rejected");
            self.metrics.rejected_total.increment();
            self.queue_reset(link);
            return;
        }
        let role = Role::Joined(Joined::new(link, Connection::accepted(packet.credit)));
        let added = match self.host.connect(link) {
            Ok(stream) => self.add(stream, role, watch),
            Err(err) => {
                debug!(%link, err = &err as &dyn std::error::Error, "Connection of the guest refused");
                self.metrics.rejected_total.increment();
                self.queue_reset(link);
                return;
            }
        };
        match added {
            Ok(token) => {
                self.links.insert(link, token);
                self.update_socket(token, watch, now);
            }
            Err(err) => {
                rate_limited!(warn, %link, %err, "Cannot watch a vsock connection");
                self.metrics.rejected_total.increment();
                self.queue_reset(link);
            }
        }
    }

    fn on_linked_packet(
        &mut self,
        token: Token,
        packet: GuestPacket,
        payload: &mut dyn Read,
        payload_bytes: usize,
        watch: &mut dyn Watch,
        now: Instant,
    ) {
        let socket = self.sockets.get_mut(&token).expect("a link's socket");
        let Role::Joined(joined) = &mut socket.role else {
            unreachable!("a link's socket is joined")
        };
        match joined.connection.on_guest_packet(packet.op, packet.credit) {
            Ok(Event::None | Event::Ended) => {}
            Ok(Event::Connected) => {
                self.metrics.connections_total.increment();
                // The write cannot block, because the line is short and the socket contains no
                // other data.
                let line = format!("OK {}\n", packet.link.host.0);
                if !matches!((&socket.stream).write(line.as_bytes()), Ok(n) if n == line.len()) {
                    joined.fail_writes(now);
                }
            }
            Ok(Event::Data { len_bytes }) => {
                if !self.take_payload(token, len_bytes, payload, payload_bytes, now) {
                    self.metrics.bad_buffers_total.increment();
                    self.break_off(token, watch);
                    return;
                }
            }
            Ok(Event::Reset) => {
                if joined.connection.is_requesting() {
                    self.metrics.rejected_total.increment();
                }
                self.part(token, watch, now);
                return;
            }
            Err(violation) => {
                debug!(link = %packet.link, %violation, "Guest violated the vsock protocol");
                self.metrics.violations_total.increment();
                self.break_off(token, watch);
                return;
            }
        }
        self.update_socket(token, watch, now);
    }

    /// Returns false if the buffers are shorter than the length in the header.
    fn take_payload(
        &mut self,
        token: Token,
        len_bytes: u32,
        payload: &mut dyn Read,
        payload_bytes: usize,
        now: Instant,
    ) -> bool {
        let socket = self.sockets.get_mut(&token).expect("a link's socket");
        let Role::Joined(joined) = &mut socket.role else {
            unreachable!("a link's socket is joined")
        };
        let mut left = len_bytes as usize;
        if left > payload_bytes {
            return false;
        }
        while left > 0 {
            let chunk = &mut self.chunk[..left.min(CHUNK_BYTES)];
            if payload.read_exact(chunk).is_err() {
                return false;
            }
            joined.send(&socket.stream, chunk, now);
            left -= chunk.len();
        }
        self.metrics.bytes_from_guest_total.add(len_bytes.into());
        true
    }

    /// Returns true if [`Muxer::next_packet`] may return a packet.
    pub(super) fn has_packets(&self) -> bool {
        !self.resets.is_empty() || !self.ready.is_empty()
    }

    /// Returns the next packet for the guest, with at most `capacity` bytes of payload. `capacity`
    /// must not be zero, because no payload could be sent then.
    pub(super) fn next_packet(
        &mut self,
        capacity: usize,
        watch: &mut dyn Watch,
        now: Instant,
    ) -> Option<Packet<'_>> {
        assert!(capacity > 0, "a packet without room for payload");
        loop {
            if let Some(link) = self.resets.pop_front() {
                self.metrics.resets_total.increment();
                return Some(self.packet(link, Op::Reset, Credit::default()));
            }
            let token = self.ready.pop_front()?;
            let socket = self.sockets.get_mut(&token).expect("removed sockets are not ready");
            socket.queued = false;
            let Role::Joined(joined) = &mut socket.role else { continue };
            let op = match joined.connection.next(socket.readable) {
                Next::Nothing => continue,
                Next::Control(op) => op,
                Next::Data { max_bytes } => {
                    let limit = (max_bytes as usize).min(capacity).min(CHUNK_BYTES);
                    match (&socket.stream).read(&mut self.chunk[..limit]) {
                        Ok(0) => {
                            joined.connection.host_ended_sending(now);
                            self.update_socket(token, watch, now);
                            continue;
                        }
                        Ok(read) => Op::Data { len_bytes: u32_of(read) },
                        Err(err) => {
                            self.on_read_error(token, &err, watch, now);
                            continue;
                        }
                    }
                }
            };
            if op == Op::Response {
                self.metrics.connections_total.increment();
            }
            let (link, credit) = (joined.link, joined.connection.send(op));
            self.update_socket(token, watch, now);
            return Some(self.packet(link, op, credit));
        }
    }

    fn packet(&self, link: Link, op: Op, credit: Credit) -> Packet<'_> {
        let header = RawHeader::to_guest(self.guest_cid, link, op, credit);
        let payload = match op {
            Op::Data { len_bytes } => &self.chunk[..len_bytes as usize],
            _ => &[],
        };
        self.metrics.packets_to_guest_total.increment();
        self.metrics.bytes_to_guest_total.add(payload.len() as u64);
        Packet { header, payload }
    }

    fn on_read_error(
        &mut self,
        token: Token,
        err: &io::Error,
        watch: &mut dyn Watch,
        now: Instant,
    ) {
        match err.kind() {
            io::ErrorKind::WouldBlock => {
                self.sockets.get_mut(&token).expect("the socket that was read").readable = false;
                self.update_socket(token, watch, now);
            }
            io::ErrorKind::Interrupted => self.update_socket(token, watch, now),
            // The host has left without reading everything. All data that it sent was already read.
            _ => self.break_off(token, watch),
        }
    }

    /// Updates a socket's state after an event.
    fn update_socket(&mut self, token: Token, watch: &mut dyn Watch, now: Instant) {
        let Some(socket) = self.sockets.get_mut(&token) else { return };
        match &mut socket.role {
            Role::Greeting { .. } => {}
            Role::Draining { unsent, .. } => {
                if unsent.is_empty() {
                    self.remove(token, watch);
                }
            }
            Role::Joined(joined) => {
                let ended = joined.connection.guest_ended();
                if ended.both() {
                    // A reset confirms the end of the connection and frees the ports (virtio 1.3,
                    // 5.10.6.5).
                    let link = joined.link;
                    self.part(token, watch, now);
                    self.queue_reset(link);
                    return;
                }
                let (notified_sending, notified_receiving) = &mut joined.notified_host;
                // Errors are ignored: they mean that the host has left, and epoll reports this as
                // well.
                if ended.sending && joined.unsent.is_empty() && !*notified_sending {
                    *notified_sending = true;
                    let _ = socket.stream.shutdown(Shutdown::Write);
                }
                if ended.receiving && !*notified_receiving {
                    *notified_receiving = true;
                    let _ = socket.stream.shutdown(Shutdown::Read);
                }
                if !socket.queued && joined.connection.next(socket.readable) != Next::Nothing {
                    socket.queued = true;
                    self.ready.push_back(token);
                }
            }
        }
    }

    /// Ends the connection for the guest. If the guest has closed the connection properly, the host
    /// still receives the remaining data.
    fn part(&mut self, token: Token, watch: &mut dyn Watch, now: Instant) {
        let socket = self.sockets.get_mut(&token).expect("the socket of a closed connection");
        let Role::Joined(joined) = &mut socket.role else {
            unreachable!("only joined sockets are closed")
        };
        if !joined.connection.guest_ended().sending || joined.unsent.is_empty() {
            self.remove(token, watch);
            return;
        }
        self.links.remove(&joined.link);
        let unsent = std::mem::take(&mut joined.unsent);
        socket.role = Role::Draining { unsent, deadline: now + DRAIN_TIMEOUT };
    }

    /// Immediately resets a connection on both sides.
    fn break_off(&mut self, token: Token, watch: &mut dyn Watch) {
        if let Some(Socket { role: Role::Joined(joined), .. }) = self.sockets.get(&token) {
            let link = joined.link;
            self.queue_reset(link);
        }
        self.remove(token, watch);
    }

    fn queue_reset(&mut self, link: Link) {
        if self.resets.len() < MAX_RESETS {
            self.resets.push_back(link);
        } else {
            self.metrics.dropped_total.increment();
        }
    }

    /// Earliest time at which [`Muxer::expire`] has an effect.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.sockets.values().filter_map(Socket::deadline).min()
    }

    /// Ends connections whose deadline has passed.
    pub(super) fn expire(&mut self, watch: &mut dyn Watch, now: Instant) {
        let late = |(token, socket): (&Token, &Socket)| {
            socket.deadline().is_some_and(|deadline| deadline <= now).then_some(*token)
        };
        let late: Vec<Token> = self.sockets.iter().filter_map(late).collect();
        for token in late {
            self.metrics.expired_total.increment();
            self.break_off(token, watch);
        }
    }
}

impl Socket {
    fn deadline(&self) -> Option<Instant> {
        match &self.role {
            Role::Greeting { deadline, .. } => Some(*deadline),
            Role::Joined(joined) => joined.connection.deadline(),
            Role::Draining { deadline, .. } => Some(*deadline),
        }
    }
}

#[cfg(test)]
#[path = "muxer_tests.rs"]
mod tests;
