//! Tests of the log lines of refused calls and connections.

use std::io;
use std::sync::Arc;

use foreshore_devices::log::with_subscriber;
use parking_lot::Mutex;
use tokio::io::Interest;

use super::*;

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl io::Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.lock().push(String::from_utf8_lossy(line).trim_end().to_owned());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Runs a test, and returns its warnings without their times and levels.
fn warnings<F: Future<Output = ()>>(
    limits: Limits,
    test: impl FnOnce(Fixture) -> F,
) -> Vec<String> {
    let lines = Lines::default();
    let writer = lines.clone();
    let log = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_ansi(false)
        .without_time()
        .with_target(false)
        .with_writer(move || writer.clone());
    with_subscriber(log.finish(), || run_within(limits, test));
    let lines = std::mem::take(&mut *lines.0.lock());
    lines.into_iter().map(|line| line.trim_start_matches(" WARN ").to_owned()).collect()
}

#[test]
fn refused_call_is_logged_with_status_and_reason() {
    let refused = [
        ("PUT", "vm.boot", "", 405),
        ("PUT", "vm.reboot", "", 500),
        ("PUT", "vm.resize", "{", 400),
        ("PUT", "vm.add-fs", "{}", 501),
        ("GET", "vm.resize", "", 405),
        ("PUT", "vm.fly", "", 404),
    ];
    let answered = Arc::<Mutex<Vec<String>>>::default();
    let expected = Arc::clone(&answered);
    let lines = warnings(Limits::API, async |fixture| {
        for (method, call, body, status) in refused {
            let (answer, body) = fixture.call(method, call, body).await;
            assert_eq!(answer, status, "{call}");
            let reason = messages(&body).join(": ");
            expected.lock().push(format!(
                "Refused an API call times=1 method={method} path=\"/api/v1/{call}\" \
                 status={status} reason={reason:?}"
            ));
        }
        assert_eq!(fixture.call("GET", "vmm.ping", "").await.0, 200);
    });
    assert_eq!(lines, *answered.lock());
}

#[test]
fn repeated_refusal_is_logged_sparsely_and_hides_no_other() {
    let lines = warnings(Limits::API, async |fixture| {
        for nth in 0..5 {
            fixture.call("PUT", "vm.boot", "").await;
            fixture.call("PUT", &format!("vm.fly{nth}"), "").await;
        }
        fixture.call("PUT", "vm.reboot", "").await;
    });
    let of = |call: &str| {
        let lines = lines.iter().filter(|line| line.contains(call));
        lines.map(|line| line.split(' ').nth(4).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(of("/vm.boot\""), ["times=1", "times=2", "times=4"]);
    let counted: Vec<_> = lines.iter().filter(|line| line.contains("suppressed=")).collect();
    assert!(matches!(&counted[..], [line] if line.contains("times=4 suppressed=1 ")), "{lines:?}");
    // The reason contains the path, so each of these refusals has a new reason.
    assert_eq!(of("path=\"/api/v1/vm.fly"), ["times=1"; 5]);
    assert_eq!(of("/vm.reboot\""), ["times=1"]);
}

/// Advances the clock until `wanted` is complete. The clock must be paused. It does not advance by
/// itself, because a runtime with this future is never idle.
async fn advance_until<T>(wanted: impl Future<Output = T>) -> T {
    tokio::pin!(wanted);
    loop {
        tokio::select! {
            biased;
            result = &mut wanted => return result,
            () = tokio::time::advance(Duration::from_millis(1)) => {}
        }
    }
}

#[test]
fn refused_connections_are_logged() {
    let (head, unread) = (Duration::from_millis(50), Duration::from_millis(50));
    let limits = Limits { connections: 1, head, unread, ..Limits::API };
    let lines = warnings(limits, async |fixture| {
        tokio::time::pause();
        // Keeps the runtime from advancing the clock to the next timer while it waits for a socket.
        tokio::spawn(async {
            loop {
                tokio::task::yield_now().await;
            }
        });
        let mut invalid = fixture.connect().await;
        invalid.send("GET / HTTP/9.9\r\n\r\n").await;
        assert_eq!(invalid.receive().await.expect("an answer").0, 400);
        assert_eq!(invalid.receive().await, None);
        let mut late = fixture.connect().await;
        late.send("GET /api/v1/vmm.pi").await;
        assert_eq!(advance_until(late.receive()).await, None);
        let mut idle = fixture.connect().await;
        assert_eq!(idle.call("GET", "vmm.ping", "").await.0, 200);
        assert_eq!(advance_until(fixture.call("GET", "vmm.ping", "")).await.0, 200);
        assert_eq!(idle.receive().await, None);
        // The answers do not fit into the buffers of the socket.
        let mut silent = fixture.connect().await;
        silent.send(request("GET", "/api/v1/vm.info", "").repeat(2000)).await;
        let is_closed =
            async || silent.0.get_ref().ready(Interest::WRITABLE).await.unwrap().is_write_closed();
        while !is_closed().await {
            tokio::time::advance(Duration::from_millis(1)).await;
        }
    });
    for text in [
        "Refused a request that is not valid HTTP/1.1 ",
        "Closed a connection because the head of its request is incomplete ",
        "Closed a connection because its client does not read the answer ",
        "Closed the connection that waited longest for its client, to make room for another ",
    ] {
        let logged = lines.iter().find(|line| line.starts_with(text));
        assert!(logged.is_some_and(|line| line.contains("flag=\"--api-socket\"")), "{lines:#?}");
    }
}

#[test]
fn request_without_valid_http_is_logged_with_the_answered_status() {
    for (bytes, answered) in [
        ("GET / HTTP/9.9\r\n\r\n".to_owned(), Some(400)),
        (format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(64 << 10)), Some(431)),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(), None),
    ] {
        let lines = warnings(Limits::API, async |fixture| {
            let mut client = fixture.connect().await;
            let _ = client.0.get_mut().write_all(bytes.as_bytes()).await;
            assert_eq!(client.receive().await.map(|(status, _)| status), answered);
        });
        let [line] = &lines[..] else { panic!("{lines:#?}") };
        assert!(line.starts_with("Refused a request that is not valid HTTP/1.1 times=1"), "{line}");
        let status = answered.map(|status| format!(" status={status} "));
        assert_eq!(line.contains(" status="), status.is_some(), "{line}");
        assert!(status.is_none_or(|status| line.contains(&status)), "{line}");
    }
}
