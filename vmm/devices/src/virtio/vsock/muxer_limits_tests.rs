//! Tests of the limits on sockets, and of data that remains after the guest has closed a
//! connection.

use super::*;

impl Fixture {
    /// Returns the number of bytes of a connection that were not written to the host's socket yet.
    fn unsent(&self, link: Link) -> usize {
        let socket = self.muxer.links.get(&link).and_then(|token| self.muxer.sockets.get(token));
        match socket.map(|socket| &socket.role) {
            Some(Role::Joined(joined)) => joined.unsent.len(),
            _ => 0,
        }
    }
}

#[test]
fn slow_host_stops_the_guest_until_it_reads() {
    let mut fixture = Fixture::new();
    let (mut client, link) = fixture.connected_client();
    let mut forwarded = 0;
    let sent = stuff(&mut fixture, link, &mut forwarded);
    // The guest receives no more credit until the host reads data.
    fixture.guest_expects_nothing();
    let mut read = 0;
    while forwarded < sent - BUFFER_BYTES / 4 {
        read += read_some(&mut client).len();
        while let Some((packet, _)) = fixture.guest_receives() {
            assert_eq!(packet.op, Op::CreditUpdate);
            forwarded = packet.credit.fwd_cnt;
        }
    }
    while read < sent as usize {
        read += read_some(&mut client).len();
        fixture.poll();
    }
    assert_eq!(read, sent as usize);
    assert_waits(&mut client);
}

#[test]
fn slow_host_receives_everything_after_the_guest_has_left() {
    let mut fixture = Fixture::new();
    let (mut client, link) = fixture.connected_client();
    let sent = stuff(&mut fixture, link, &mut 0);
    fixture.guest_sends(link, Op::Shutdown(BOTH), &[]);
    fixture.guest_expects(link, Op::Reset);
    // The guest may reuse the ports immediately. The new connection is independent of the old one,
    // whose data is still being delivered.
    fixture.guest_sends_data(link, b"stray");
    fixture.guest_expects(link, Op::Reset);
    assert_eq!(fixture.metrics.connections.get(), 1);
    let mut read = Vec::new();
    loop {
        let some = read_some(&mut client);
        if some.is_empty() {
            break;
        }
        read.extend(some);
        fixture.poll();
    }
    assert_eq!(read.len(), sent as usize);
    assert!(read.iter().all(|&byte| byte == 7));
    assert_eq!(fixture.metrics.connections.get(), 0);
}

#[test]
fn host_that_leaves_frees_the_pending_data() {
    let mut fixture = Fixture::new();
    let (client, link) = fixture.connected_client();
    stuff(&mut fixture, link, &mut 0);
    fixture.guest_sends(link, Op::Shutdown(BOTH), &[]);
    fixture.guest_expects(link, Op::Reset);
    drop(client);
    fixture.poll();
    assert_eq!(fixture.metrics.connections.get(), 0);
    assert!(fixture.watch.0.is_empty());
}

#[test]
fn pending_resets_are_bounded() {
    let mut fixture = Fixture::new();
    for port in 0..3 * u32_of(MAX_RESETS) {
        let link = Link { host: HostPort(5), guest: GuestPort(port) };
        fixture.guest_sends(link, Op::CreditRequest, &[]);
    }
    assert_eq!(fixture.muxer.resets.len(), MAX_RESETS);
    assert_eq!(fixture.metrics.dropped_total.get(), 2 * MAX_RESETS as u64);
}

#[test]
fn sockets_use_at_most_half_of_the_files() {
    assert_eq!([0, 1, 256, 1024, 2046].map(max_sockets), [0, 0, 128, 512, 1023]);
    assert_eq!([2048, 1 << 20, u64::MAX].map(max_sockets), [MAX_SOCKETS; 3]);
}

#[test]
fn sockets_are_bounded_and_reused() {
    const BOUND: usize = 100;
    let mut fixture = Fixture::new();
    let request = |fixture: &mut Fixture, port| {
        let link = Link { host: HostPort(AGENT), guest: GuestPort(port) };
        fixture.guest_sends(link, Op::Request, &[]);
        let (packet, _) = fixture.guest_receives().unwrap();
        (link, packet.op)
    };
    fixture.muxer.max_sockets = BOUND;
    let mut open_clients = Vec::new();
    let mut port = 0;
    while open_clients.len() < BOUND {
        assert_eq!(request(&mut fixture, port).1, Op::Response);
        open_clients.push(fixture.agent.try_recv().unwrap());
        port += 1;
    }
    let (_, op) = request(&mut fixture, port);
    assert_eq!(op, Op::Reset);
    open_clients.pop();
    fixture.poll();
    let last = Link { host: HostPort(AGENT), guest: GuestPort(port - 1) };
    fixture.guest_expects(last, Op::Shutdown(BOTH));
    fixture.guest_sends(last, Op::Reset, &[]);
    let (_, op) = request(&mut fixture, port);
    assert_eq!(op, Op::Response);
}

#[test]
fn agent_connects_while_all_other_sockets_are_used() {
    const BOUND: usize = 16;
    const PORT: u32 = 52;
    let mut fixture = Fixture::new();
    fixture.muxer.max_sockets = BOUND;
    let listener = fixture.listen(PORT);
    let request = |fixture: &mut Fixture, host, guest| {
        let link = Link { host: HostPort(host), guest: GuestPort(guest) };
        fixture.guest_sends(link, Op::Request, &[]);
        fixture.guest_receives().unwrap().0.op
    };
    let ops: Vec<_> =
        (0..BOUND as u32).map(|guest| request(&mut fixture, PORT, 2000 + guest)).collect();
    let (taken, refused) = ops.split_at(BOUND - BOUND / OWN_PART);
    assert!(
        taken.iter().all(|op| *op == Op::Response) && refused.iter().all(|op| *op == Op::Reset)
    );
    let client = fixture.client();
    fixture.poll();
    assert_eq!(fixture.muxer.sockets.len(), taken.len(), "clients on the host are rejected too");
    assert_eq!(request(&mut fixture, AGENT, 3000), Op::Response);
    drop((client, listener));
}

#[test]
fn unread_rest_of_a_closed_connection_expires() {
    let mut fixture = Fixture::new();
    let (mut client, link) = fixture.connected_client();
    // The payload exceeds the size of the socket's own buffer.
    let payload = vec![7; BUFFER_BYTES as usize / 4];
    while fixture.unsent(link) < 3 * payload.len() {
        fixture.guest_sends(link, Op::Data { len_bytes: payload.len() as u32 }, &payload);
        while fixture.guest_receives().is_some() {}
    }
    fixture.guest_sends(link, Op::Shutdown(BOTH), &[]);
    assert_eq!(fixture.muxer.next_deadline(), Some(fixture.now + DRAIN_TIMEOUT));
    // Each time the host reads some data, the deadline is extended.
    fixture.now += DRAIN_TIMEOUT - Duration::from_millis(1);
    let left_bytes = |fixture: &Fixture| match &fixture.muxer.sockets.values().next().unwrap().role
    {
        Role::Draining { unsent, .. } => unsent.len(),
        _ => panic!("the connection is closed"),
    };
    let before_bytes = left_bytes(&fixture);
    while left_bytes(&fixture) == before_bytes {
        client.read_exact(&mut vec![0; 4096]).unwrap();
        fixture.poll();
    }
    assert!(
        left_bytes(&fixture) > 0
            && fixture.muxer.next_deadline() == Some(fixture.now + DRAIN_TIMEOUT)
    );
    fixture.now += DRAIN_TIMEOUT - Duration::from_millis(1);
    fixture.muxer.expire(&mut fixture.watch, fixture.now);
    assert_eq!(fixture.muxer.sockets.len(), 1);
    fixture.now += Duration::from_millis(1);
    fixture.muxer.expire(&mut fixture.watch, fixture.now);
    assert_eq!((fixture.muxer.sockets.len(), fixture.metrics.expired_total.get()), (0, 1));
    drop(client);
}
