//! Tests of the limits on the number and duration of connections.

use std::sync::atomic::Ordering;

use tokio::io::Interest;

use super::*;
use crate::api::routes::MAX_FOLLOWERS;

#[test]
fn client_that_never_reads_is_disconnected() {
    const REQUESTS: usize = 2_000;
    let limits = Limits { unread: Duration::from_millis(50), ..Limits::API };
    for half_closed in [false, true] {
        run_within(limits, async |fixture| {
            let mut silent = fixture.connect().await;
            // The answers do not fit into the buffers of the socket.
            silent.send(request("GET", "/api/v1/vm.info", "").repeat(REQUESTS)).await;
            if half_closed {
                silent.0.get_mut().shutdown().await.unwrap();
            }
            while !silent.0.get_ref().ready(Interest::WRITABLE).await.unwrap().is_write_closed() {
                tokio::task::yield_now().await;
            }
            let mut answers = Vec::new();
            // The client reads the end of the stream, or gets a reset if unread requests remain.
            let _ = silent.0.read_to_end(&mut answers).await;
            let whole = answers.windows(12).filter(|bytes| bytes == b"HTTP/1.1 200").count();
            assert!((1..REQUESTS).contains(&whole), "{whole} of the answers were there");
        });
    }
}

#[test]
fn connection_without_a_request_is_closed_before_one_that_had_requests() {
    let limits = Limits { connections: 2, ..Limits::API };
    run_within(limits, async |fixture| {
        let (mut idle, mut half) = (fixture.connect().await, fixture.connect().await);
        assert_eq!(idle.call("GET", "vmm.ping", "").await.0, 200);
        half.send("GET /api/v1/vmm.pi").await;
        let mut next = fixture.connect().await;
        assert_eq!(next.call("GET", "vmm.ping", "").await.0, 200);
        assert_eq!(half.receive().await, None);
        assert_eq!(idle.call("GET", "vmm.ping", "").await.0, 200);
        // All connections have delivered requests now, and `next` has waited longest for its
        // client.
        assert_eq!(fixture.call("GET", "vmm.ping", "").await.0, 200);
        assert_eq!(next.receive().await, None);
        assert_eq!(idle.call("GET", "vmm.ping", "").await.0, 200);
    });
}

/// The server reads from the second client only after it has accepted the connection. All time
/// limits are too long to affect the result.
#[test]
fn client_that_writes_before_accept_does_not_block_the_next_one() {
    let limits =
        Limits { connections: 2, head: Duration::from_secs(3600), idle: None, ..Limits::API };
    for sent in ["GET /api/v1/vmm.pi", &request("GET", "/api/v1/vmm.events", "")] {
        run_within(limits, async |fixture| {
            let mut idle = fixture.connect().await;
            assert_eq!(idle.call("GET", "vmm.ping", "").await.0, 200);
            let mut second = fixture.connect().await;
            second.send(sent).await;
            assert_eq!(fixture.call("GET", "vmm.ping", "").await.0, 200);
        });
    }
}

/// The grace time is too long to affect the result.
#[test]
fn end_of_a_connection_makes_room_at_once() {
    let limits = Limits { connections: 1, grace: Duration::from_secs(3600), ..Limits::API };
    run_within(limits, async |fixture| {
        let mut only = fixture.connect().await;
        assert_eq!(only.call("GET", "vmm.ping", "").await.0, 200);
        let mut next = fixture.connect().await;
        next.send(request("GET", "/api/v1/vmm.ping", "")).await;
        // The server notices that the request is answered, and waits for the next one.
        tokio::task::yield_now().await;
        drop(only);
        assert_eq!(next.receive().await.unwrap().0, 200);
    });
}

/// Connects without sending, and connects again as soon as the server closes the connection.
async fn connect_in_silence(path: PathBuf) {
    loop {
        let mut silent = UnixStream::connect(&path).await.unwrap();
        // The client reads the end of the stream, or gets a reset.
        let _ = silent.read(&mut [0]).await;
    }
}

#[test]
fn incomplete_bodies_do_not_block_other_clients() {
    let limits = Limits { connections: 16, silent: 8, ..Limits::API };
    run_within(limits, async |mut fixture| {
        let mut kept = fixture.connect().await;
        assert_eq!(kept.call("GET", "vmm.ping", "").await.0, 200);
        let mut stalled = Vec::new();
        for call in ["vm.resize", "vm.pause"].repeat(2 * limits.connections) {
            let mut client = fixture.connect().await;
            let head = format!(
                "PUT /api/v1/{call} HTTP/1.1\r\nHost: a\r\nContent-Length: 20\r\n\r\n{{\"desi"
            );
            client.send(head).await;
            stalled.push(client);
        }
        assert_eq!(fixture.call("GET", "vmm.ping", "").await.0, 200);
        assert_eq!(kept.call("GET", "vmm.ping", "").await.0, 200);
        // The connections were closed to make room, so no connection got the error for a slow body.
        let last = stalled.split_off(stalled.len() - limits.silent);
        for client in &mut stalled {
            assert_eq!(client.receive().await, None);
        }
        let counters = fixture.server.counters();
        assert!(counters.silent.load(Ordering::Relaxed) >= stalled.len() as u64);
        assert_eq!(counters.idle.load(Ordering::Relaxed), 0);
        drop(last);
        // No call was made for an incomplete body.
        assert!(fixture.asked.try_recv().is_err());
    });
}

#[test]
fn silent_connections_do_not_displace_requests() {
    const SILENT: usize = 40;
    let limits =
        Limits { connections: 16, silent: 8, grace: Duration::from_millis(10), ..Limits::METRICS };
    run_within(limits, async |fixture| {
        let mut kept = fixture.connect().await;
        assert_eq!(kept.call("GET", "vmm.ping", "").await.0, 200);
        let silent: Vec<_> =
            (0..SILENT).map(|_| tokio::spawn(connect_in_silence(fixture.path.clone()))).collect();
        let counters = fixture.server.counters();
        let closed = || counters.silent.load(Ordering::Relaxed);
        let mut answered = 0;
        // The silent clients are disconnected four times each on average.
        while closed() < 4 * SILENT as u64 {
            assert_eq!(fixture.call("GET", "vmm.ping", "").await.0, 200);
            assert_eq!(kept.call("GET", "vmm.ping", "").await.0, 200);
            answered += 1;
        }
        assert!(answered > 0);
        assert_eq!(counters.idle.load(Ordering::Relaxed), 0);
        silent.iter().for_each(|task| task.abort());
    });
}

#[test]
fn followers_of_events_are_not_closed_to_make_room() {
    let limits = Limits { connections: 2, ..Limits::API };
    let router = |vm, events| router_within(vm, events, Duration::from_millis(20));
    run_serving(limits, router, async |fixture| {
        let mut followers = [fixture.connect().await, fixture.connect().await];
        for follower in &mut followers {
            follower.send(request("GET", "/api/v1/vmm.events", "")).await;
            let mut line = String::new();
            while !line.starts_with('{') {
                line.clear();
                assert_ne!(follower.0.read_line(&mut line).await.unwrap(), 0);
            }
        }
        let mut next = fixture.connect().await;
        next.send(request("GET", "/api/v1/vmm.ping", "")).await;
        let mut line = String::new();
        // Both followers are still served after repeated checks for room.
        for _ in 0..5 {
            for follower in &mut followers {
                assert_ne!(follower.0.read_line(&mut line).await.unwrap(), 0);
            }
        }
        fixture.events.end();
        assert_eq!(next.receive().await.unwrap().0, 200);
    });
}

#[test]
fn followers_of_events_are_limited() {
    let router = |vm, events| router_within(vm, events, Duration::from_millis(20));
    run_serving(Limits::API, router, async |fixture| {
        let follow = async || {
            let mut client = fixture.connect().await;
            client.send(request("GET", "/api/v1/vmm.events", "")).await;
            let mut line = String::new();
            client.0.read_line(&mut line).await.unwrap();
            (client, line)
        };
        let mut followers = Vec::new();
        for _ in 0..MAX_FOLLOWERS {
            let (client, line) = follow().await;
            assert!(line.starts_with("HTTP/1.1 200 "), "{line}");
            followers.push(client);
        }
        let (status, body) = fixture.call("GET", "vmm.events", "").await;
        assert_eq!(
            (status, &*messages(&body)[0]),
            (429, "at most 64 clients can follow events; disconnect one of them first")
        );
        assert_eq!(fixture.call("GET", "vmm.ping", "").await.0, 200);
        // A failing write detects that the client has disconnected.
        followers.pop();
        while !follow().await.1.starts_with("HTTP/1.1 200 ") {}
    });
}

#[test]
fn incomplete_head_times_out_and_silence_does_not() {
    let limits = Limits { head: Duration::from_millis(20), ..Limits::API };
    run_within(limits, async |fixture| {
        let (mut silent, mut half) = (fixture.connect().await, fixture.connect().await);
        half.send("GET /api/v1/vmm.pi").await;
        assert_eq!(half.receive().await, None);
        assert_eq!(silent.call("GET", "vmm.ping", "").await.0, 200);
        // A second request on a connection has the same limit.
        silent.send("GET /api/v1/vmm.pi").await;
        assert_eq!(silent.receive().await, None);
    });
}

#[test]
fn half_a_request_and_silence_block_no_other_client() {
    run(async |fixture| {
        let (mut head, mut body) = (fixture.connect().await, fixture.connect().await);
        head.send("GET /api/v1/vmm.pi").await;
        body.send("PUT /api/v1/vm.resize HTTP/1.1\r\nHost: a\r\nContent-Length: 20\r\n\r\n{\"desi")
            .await;
        assert_eq!(fixture.call("GET", "vmm.ping", "").await.0, 200);
        // The other half of the head is still accepted.
        head.send("ng HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert_eq!(head.receive().await.unwrap().0, 200);
    });
}

#[test]
fn requests_on_one_connection_are_answered_in_order() {
    run(async |fixture| {
        let mut client = fixture.connect().await;
        let three = [
            request("GET", "/api/v1/vmm.ping", ""),
            request("PUT", "/api/v1/vm.resize", r#"{"desired_ram": 2097152}"#),
            request("GET", "/api/v1/vm.none", ""),
        ];
        client.send(three.concat()).await;
        for expected in [200, 204, 404] {
            assert_eq!(client.receive().await.unwrap().0, expected);
        }
        assert_eq!(client.call("GET", "vmm.ping", "").await.0, 200);
    });
}

#[test]
fn half_closed_client_is_answered() {
    run(async |fixture| {
        let mut client = fixture.connect().await;
        // The VM task answers only after the end of the stream has arrived.
        client.send(request("GET", "/api/v1/vm.info", "")).await;
        client.0.get_mut().shutdown().await.unwrap();
        assert_eq!(client.receive().await.map(|(status, _)| status), Some(200));
        assert_eq!(client.receive().await, None);
    });
}

#[test]
fn unexpected_body_is_ignored() {
    run(async |fixture| {
        for body in ["{}", r#"{"desired_ram": 7}"#, "nonsense"] {
            assert_eq!(fixture.call("PUT", "vm.pause", body).await, (204, String::new()), "{body}");
        }
    });
}

/// If part of the body stayed unread, the connection would have to be closed.
#[test]
fn unexpected_body_may_arrive_late() {
    run(async |fixture| {
        let mut client = fixture.connect().await;
        for (method, call) in [("PUT", "vm.pause"), ("PUT", "vm.delete"), ("GET", "vmm.ping")] {
            let head =
                format!("{method} /api/v1/{call} HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n");
            client.send(head).await;
            // While this call is served, the server reads the head and could answer too early.
            assert_eq!(fixture.call("GET", "vmm.ping", "").await.0, 200);
            client.send("null").await;
            let (status, _) = client.receive().await.expect("an answer");
            assert!([200, 204].contains(&status), "{call}: {status}");
        }
        assert_eq!(client.call("GET", "vmm.ping", "").await.0, 200, "the connection is kept");
    });
}
