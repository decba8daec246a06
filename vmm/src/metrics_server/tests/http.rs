//! Tests of metrics over HTTP.

use std::path::PathBuf;
use std::sync::mpsc;

use tokio::task::yield_now;

use super::*;
use crate::config::test_config;
use crate::vm::request::{BusyVm, Requests, VmError, VmInfo};

/// Sends `request` over a unix socket, and returns the response.
async fn get(socket: &std::path::Path, request: &str) -> String {
    String::from_utf8(get_bytes(socket, request).await).unwrap()
}

async fn get_bytes(socket: &std::path::Path, request: &str) -> Vec<u8> {
    let mut stream = UnixStream::connect(socket).await.unwrap();
    stream
        .write_all(format!("{request} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").as_bytes())
        .await
        .unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    answer
}

/// Returns the head and the body of a response.
fn split_head(answer: &[u8]) -> (&str, &[u8]) {
    const END: &[u8] = b"\r\n\r\n";
    let at = answer.windows(END.len()).position(|window| window == END).unwrap();
    (std::str::from_utf8(&answer[..at]).unwrap(), &answer[at + END.len()..])
}

#[test]
fn requests_for_unknown_hosts_are_refused_on_tcp() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (address, _) = MetricsAddress::parse_named("127.0.0.1:0,host=vm1.example.org").unwrap();
        let socket = Socket::for_metrics(&address).unwrap();
        let tcp = socket.tcp_address().unwrap();
        let metrics = Arc::new(Metrics::new("a"));
        // Without a VM task, the VM has no zones.
        let (vm, _) = VmHandle::channel();
        let router = router(Arc::clone(&metrics), vm, address.host_names());
        let server = Server::start(socket, router, Limits::METRICS).unwrap();
        metrics.add(Arc::new(ServerMetrics::new("metrics", server.counters())));
        let get = async |host: &str| {
            let mut stream = TcpStream::connect(tcp).await.unwrap();
            let request =
                format!("GET /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            answer
        };
        for host in [&*tcp.to_string(), "localhost", "vm1.example.org:9745", "192.0.2.1"] {
            let answer = get(host).await;
            assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        }
        let answer = get("evil.example").await;
        assert!(answer.starts_with("HTTP/1.1 421 ") && !answer.contains("foreshore_"), "{answer}");
        assert!(
            answer.contains("\"evil.example\" is neither an IP address nor localhost"),
            "{answer}"
        );
        let answer = get("localhost").await;
        assert!(answer.contains("foreshore_metrics_refused_hosts_total{vm=\"a\"} 1\n"), "{answer}");
        let accepted = "foreshore_http_connections_total{vm=\"a\",server=\"metrics\"} 6\n";
        assert!(answer.contains(accepted), "{answer}");
        server.stop().await;
    });
}

/// Source that blocks until the sender of its channel is dropped.
struct Stuck {
    has_begun: mpsc::Sender<()>,
    release: parking_lot::Mutex<mpsc::Receiver<()>>,
}

impl Expose for Stuck {
    fn expose(&self, _out: &mut Exposition) {
        self.has_begun.send(()).unwrap();
        let released = self.release.lock().recv_timeout(Duration::from_secs(60));
        assert_eq!(
            released,
            Err(mpsc::RecvTimeoutError::Disconnected),
            "no other request was served"
        );
    }
}

#[test]
fn other_requests_are_served_while_a_source_waits() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics");
        let (has_begun, begun) = mpsc::channel();
        let (release, released) = mpsc::channel();
        let metrics = Metrics::new("a");
        metrics.add(Arc::new(Stuck { has_begun, release: released.into() }));
        // Without a VM task, the VM has no zones.
        let (vm, _) = VmHandle::channel();
        let socket =
            Socket::for_metrics(&MetricsAddress::Unix(path.clone(), Default::default())).unwrap();
        let server =
            Server::start(socket, router(Arc::new(metrics), vm, None), Limits::METRICS).unwrap();
        let scrape = tokio::spawn({
            let path = path.clone();
            async move { get(&path, "GET /metrics").await }
        });
        tokio::task::spawn_blocking(move || begun.recv().unwrap()).await.unwrap();
        assert!(get(&path, "GET /").await.starts_with("HTTP/1.1 200 "));
        drop(release);
        assert!(scrape.await.unwrap().starts_with("HTTP/1.1 200 "));
        server.stop().await;
    });
}

/// Metrics server on a socket, with the limits of the VMM. It must be served on a runtime whose
/// clock is paused.
struct Limited {
    path: PathBuf,
    server: Server,
}

impl Limited {
    fn start(folder: &Path) -> Self {
        let path = folder.join("metrics");
        let (vm, _) = VmHandle::channel();
        let address = MetricsAddress::Unix(path.clone(), Default::default());
        let router = router(Arc::new(Metrics::new("a")), vm, None);
        let socket = Socket::for_metrics(&address).unwrap();
        Self { path, server: Server::start(socket, router, Limits::METRICS).unwrap() }
    }

    /// Connects, and waits until the server has accepted the connection.
    async fn connect(&self) -> UnixStream {
        let accepted = || self.counts()[0];
        let before = accepted();
        let stream = UnixStream::connect(&self.path).await.unwrap();
        while accepted() == before {
            yield_now().await;
        }
        stream
    }

    /// Connects, and requests a page.
    async fn connect_and_request(&self) -> UnixStream {
        let mut stream = self.connect().await;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        while !answer.ends_with(INDEX) {
            let mut part = [0; 1024];
            let len = stream.read(&mut part).await.unwrap();
            assert_ne!(len, 0, "{answer}");
            answer.push_str(std::str::from_utf8(&part[..len]).unwrap());
        }
        stream
    }

    /// Numbers of connections: accepted; closed to make room, before and after their first request;
    /// closed after a time limit.
    fn counts(&self) -> [u64; 4] {
        let counters = self.server.counters();
        [&counters.accepted, &counters.silent, &counters.idle, &counters.timed_out]
            .map(|counter| counter.load(Ordering::Relaxed))
    }
}

/// Runs `test` with a clock that only the test advances. An idle runtime with a paused clock would
/// skip to the next timer instead of waiting for a socket.
fn with_stopped_clock(test: impl AsyncFnOnce(Limited)) {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_all().start_paused(true).build().unwrap().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let begin = std::time::Instant::now();
        let stay_busy = async {
            while begin.elapsed() < Duration::from_secs(60) {
                yield_now().await;
            }
        };
        tokio::select! {
            () = test(Limited::start(folder.path())) => {}
            () = stay_busy => panic!("the server does not answer or close a connection"),
        }
    });
}

/// Waits until the server closes the connection.
async fn wait_until_closed(stream: &mut UnixStream) {
    assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
}

#[test]
fn idle_metrics_connections_are_closed_after_60_seconds() {
    with_stopped_clock(async |server| {
        let mut idle = [server.connect().await, server.connect_and_request().await];
        tokio::time::advance(Duration::from_millis(59_900)).await;
        server.connect_and_request().await;
        assert_eq!(server.counts(), [3, 0, 0, 0]);
        tokio::time::advance(Duration::from_millis(200)).await;
        for stream in &mut idle {
            wait_until_closed(stream).await;
        }
        while server.counts() != [3, 0, 0, 2] {
            yield_now().await;
        }
    });
}

#[test]
fn metrics_server_accepts_64_connections_and_32_without_a_request() {
    /// Longer than the time that a client has to send its request.
    const LATER: Duration = Duration::from_secs(1);
    with_stopped_clock(async |server| {
        let mut silent = Vec::new();
        for _ in 0..32 {
            silent.push(server.connect().await);
        }
        tokio::time::advance(LATER).await;
        // One more connection is accepted only after the server has closed the first one.
        silent.push(server.connect().await);
        assert_eq!(server.counts(), [33, 1, 0, 0]);
        wait_until_closed(&mut silent[0]).await;
    });
    with_stopped_clock(async |server| {
        let mut idle = Vec::new();
        for _ in 0..64 {
            idle.push(server.connect_and_request().await);
        }
        tokio::time::advance(LATER).await;
        assert_eq!(server.counts(), [64, 0, 0, 0]);
        idle.push(server.connect_and_request().await);
        assert_eq!(server.counts(), [65, 0, 1, 0]);
        wait_until_closed(&mut idle[0]).await;
    });
}

fn running() -> VmStatus {
    VmStatus { state: VmState::Running, started: Some(UNIX_EPOCH) }
}

/// Answers the requests of one read of the metrics with `status` and, if there is a machine, with
/// the zone `dram`. Returns the scrape.
async fn read(
    source: &VmSource,
    requests: &mut Requests,
    status: Result<VmStatus, VmError>,
) -> String {
    let mut status = Some(status);
    let serve = async {
        while let Some(request) = requests.recv().await {
            match request {
                VmRequest::Status(reply) => reply.send(status.take().unwrap()).unwrap(),
                VmRequest::Memory(reply) => reply.send(Ok(vec![zone("dram", None)])).unwrap(),
                other => panic!("{other:?}"),
            }
        }
    };
    tokio::select! {
        metrics = source.read() => Metrics::new("a").encode(&metrics).unwrap(),
        () = serve => unreachable!("the source has a handle"),
    }
}

#[test]
fn vm_is_absent_only_if_it_is_not_created() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let (vm, mut requests) = VmHandle::channel();
        let source = VmSource::new(vm);
        let text = read(&source, &mut requests, Err(VmError::NotCreated)).await;
        assert!(text.contains(r#"foreshore_vm_state{vm="a",state="absent"} 1.0"#), "{text}");
        for refusal in [VmError::Ending, VmError::AlreadyCreated] {
            let text = read(&source, &mut requests, Err(refusal)).await;
            assert!(!text.contains("foreshore_vm_state{"), "{text}");
        }
        drop(requests);
        let text = Metrics::new("a").encode(&source.read().await).unwrap();
        assert!(!text.contains("foreshore_vm_state{"), "{text}");
    });
}

/// Nobody answers the requests while the VM task is busy.
#[test]
fn busy_vm_task_does_not_delay_a_scrape() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let (vm, mut requests) = VmHandle::channel();
        let source = VmSource::new(vm);
        let has = |text: &str, line: &str| text.lines().any(|shown| shown.starts_with(line));
        let state = r#"foreshore_vm_state{vm="a",state="running"} 1.0"#;
        let zone = r#"foreshore_memory_boot_bytes{vm="a",zone="dram""#;
        let text = read(&source, &mut requests, Ok(running())).await;
        assert!(has(&text, state) && has(&text, zone), "{text}");
        let busy = requests.busy();
        let scrape_of = async |status: VmStatus| {
            let info = VmInfo {
                config: test_config(),
                state: status.state,
                memory_actual_size: 0,
                pause_reason: None,
                balloon: None,
                guest_kernel: None,
                device_tree: None,
            };
            busy.send_replace(Some(BusyVm { info, status }));
            Metrics::new("a").encode(&source.read().await).unwrap()
        };
        let text = scrape_of(running()).await;
        assert!(has(&text, state) && has(&text, zone), "{text}");
        // The zones of another machine are not shown.
        let later = Some(UNIX_EPOCH + Duration::from_secs(1));
        let text = scrape_of(VmStatus { started: later, ..running() }).await;
        assert!(has(&text, state) && !has(&text, zone), "{text}");
        let created = VmStatus { state: VmState::Created, started: None };
        let text = scrape_of(created).await;
        assert!(!has(&text, state) && !has(&text, zone), "{text}");
    });
}

#[test]
fn metrics_are_served_over_http() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics");
        let (vm, mut requests) = VmHandle::channel();
        tokio::spawn(async move {
            while let Some(request) = requests.recv().await {
                match request {
                    VmRequest::Memory(reply) => reply.send(Ok(vec![zone("dram", None)])).unwrap(),
                    VmRequest::Status(reply) => reply.send(Ok(running())).unwrap(),
                    other => panic!("{other:?}"),
                }
            }
        });
        let socket =
            Socket::for_metrics(&MetricsAddress::Unix(path.clone(), Default::default())).unwrap();
        let everything = everything();
        let server = Server::start(
            socket,
            router(Arc::clone(&everything.metrics), vm, None),
            Limits::METRICS,
        )
        .unwrap();
        let answer = get(&path, "GET /metrics").await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        assert!(answer.contains("Content-Type: text/plain; version=0.0.4"), "{answer}");
        assert!(
            answer.contains("foreshore_memory_boot_bytes{") && !answer.contains("# EOF"),
            "{answer}"
        );
        let open = "GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text\r\nX-Rest:";
        let answer = get(&path, open).await;
        assert!(
            answer.contains("Content-Type: application/openmetrics-text; version=1.0.0"),
            "{answer}"
        );
        assert!(
            answer.contains("foreshore_memory_boot_bytes{") && answer.ends_with("# EOF\n"),
            "{answer}"
        );
        let compressed = "GET /metrics HTTP/1.1\r\nAccept-Encoding: gzip\r\nX-Rest:";
        let answer = get_bytes(&path, compressed).await;
        let (head, body) = split_head(&answer);
        assert!(head.to_ascii_lowercase().contains("content-encoding: gzip"), "{head}");
        let mut text = String::new();
        std::io::Read::read_to_string(&mut flate2::read::GzDecoder::new(body), &mut text).unwrap();
        assert!(text.contains("foreshore_memory_boot_bytes{"), "{text}");
        assert!(
            text.contains("foreshore_vm_state{vm=\"vm \\\"1\\\"\",state=\"running\"} 1.0"),
            "{text}"
        );
        assert!(get(&path, "GET /").await.contains("href=\"/metrics\""));
        assert!(get(&path, "GET /other").await.starts_with("HTTP/1.1 404 "));
        assert!(get(&path, "PUT /metrics").await.starts_with("HTTP/1.1 405 "));
        server.stop().await;
    });
}
