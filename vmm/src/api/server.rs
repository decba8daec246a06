//! HTTP/1.1 server on a socket. It runs a task for each connection on the current tokio runtime.

use std::error::Error;
use std::future::pending;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener as AcceptIo;
use foreshore_devices::unix_socket::SocketFile;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, info, warn};

use super::connection_slot::{
    Answer, ConnectionCounters, ConnectionSlot, ConnectionSlots, Question, Room,
};
use super::fd_stream::{self, Descriptors};
use super::refusal_log::ConnectionWarnings;
use super::socket::{Listener, Socket};
use super::write_timeout::WriteTimeout;

/// Size of a connection's buffer for unparsed bytes. The head of a request must fit into it.
const BUFFER_BYTES: usize = 16 << 10;
/// Time limit for answers in progress after the server is stopped.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit for the head of a request. Clients send the whole head in one write.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that a new client has to send its request. Clients send it immediately, but their threads
/// may have to wait for a CPU.
const GRACE: Duration = Duration::from_millis(250);
/// Time limit for a client that does not read its answer. If a client is stopped for longer, it has
/// to repeat its request.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(30);

/// Limits on connections and on slow clients.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of connections. To accept one more, the server closes the connection that has
    /// waited longest for its client. If no connection waits for its client, the new one is not
    /// accepted yet.
    pub connections: usize,
    /// Maximum number of connections that have not delivered a whole request yet.
    pub silent: usize,
    /// Time that a connection may wait for its client before it is closed to make room.
    pub grace: Duration,
    /// Time limit from the first byte of a request to the end of its head.
    pub head: Duration,
    /// Maximum time until the next complete request head on a connection, or `None` for no limit.
    /// HTTP cannot distinguish a slow client from one that keeps its connection for later requests.
    pub idle: Option<Duration>,
    /// Time limit for a client that reads nothing while its answer exceeds the buffers of the
    /// socket.
    pub unread: Duration,
}

impl Limits {
    /// Limits of the API. Idle connections have no limit, because clients like Kata Containers keep
    /// one connection for the lifetime of a VM.
    pub const API: Self = Self {
        connections: 256,
        silent: 128,
        grace: GRACE,
        head: HEAD_TIMEOUT,
        idle: None,
        unread: UNREAD_TIMEOUT,
    };
    /// Limits of the metrics server, whose address may be reachable from other hosts.
    pub const METRICS: Self =
        Self { connections: 64, silent: 32, idle: Some(Duration::from_secs(60)), ..Self::API };
}

/// Server that runs until it is stopped or dropped.
#[derive(Debug)]
pub struct Server {
    /// Flag of the socket, for log lines.
    flag: &'static str,
    stop: watch::Sender<()>,
    accepting: JoinHandle<()>,
    counters: Arc<ConnectionCounters>,
    _file: Option<SocketFile>,
}

impl Server {
    /// Serves `router` on `socket`. Must be called on a tokio runtime with I/O and time.
    pub fn start(socket: Socket, router: Router, limits: Limits) -> io::Result<Self> {
        socket.file.iter().for_each(SocketFile::log_replacement);
        let (stop, stopped) = watch::channel(());
        let counters = Arc::<ConnectionCounters>::default();
        let warnings = Arc::new(ConnectionWarnings::new(socket.flag));
        let service = Service { router, limits, warnings };
        let counted = Arc::clone(&counters);
        let accepting = match socket.listener {
            Listener::Unix(listener) => {
                let listener = UnixListener::from_std(listener)?;
                tokio::spawn(accept_loop(listener, service, counted, stopped))
            }
            Listener::Tcp(listener) => {
                let listener = TcpListener::from_std(listener)?;
                info!(flag = socket.flag, address = %listener.local_addr()?, "Listening");
                tokio::spawn(accept_loop(listener, service, counted, stopped))
            }
        };
        Ok(Self { flag: socket.flag, stop, accepting, counters, _file: socket.file })
    }

    pub fn counters(&self) -> Arc<ConnectionCounters> {
        Arc::clone(&self.counters)
    }

    /// Stops accepting connections, and waits briefly for answers in progress.
    pub async fn stop(mut self) {
        let _ = self.stop.send(());
        if let Err(error) = (&mut self.accepting).await {
            warn!(flag = self.flag, %error, "The task of a server has failed");
        }
    }
}

/// Router, limits and log that all connections of a server share.
#[derive(Clone)]
struct Service {
    router: Router,
    limits: Limits,
    warnings: Arc<ConnectionWarnings>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

trait Accepted: Send + 'static {
    /// Returns the byte stream of the connection. Descriptors that arrive with the bytes are added
    /// to `waiting`.
    fn stream(self, waiting: Descriptors) -> impl AsyncRead + AsyncWrite + Unpin + Send + 'static;
}

impl Accepted for UnixStream {
    fn stream(self, waiting: Descriptors) -> impl AsyncRead + AsyncWrite + Unpin + Send + 'static {
        fd_stream::receiving(self, waiting)
    }
}

impl Accepted for TcpStream {
    fn stream(self, _waiting: Descriptors) -> impl AsyncRead + AsyncWrite + Unpin + Send + 'static {
        self
    }
}

async fn accept_loop<L>(
    mut listener: L,
    service: Service,
    counters: Arc<ConnectionCounters>,
    mut stopped: watch::Receiver<()>,
) where
    L: AcceptIo<Io: Accepted>,
{
    let (mut connections, slots) =
        (JoinSet::new(), ConnectionSlots::new(service.limits, Arc::clone(&counters)));
    loop {
        let room = slots.room();
        let wakes_at = match room {
            Room::From(time) => Some(time),
            Room::Free | Room::Instead(_) | Room::None => None,
        };
        tokio::select! {
            biased;
            _ = stopped.changed() => break,
            Some(_) = connections.join_next() => {}
            (stream, _) = listener.accept(), if matches!(room, Room::Free | Room::Instead(_)) => {
                if let Room::Instead(slot) = room {
                    // If the chosen connection has received a request in the meantime, it is not
                    // closed. The server then has one connection too many for a while.
                    slots.dismiss(&slot);
                }
                let (slot, counters) = (slots.take(), Arc::clone(&counters));
                let served = serve_connection(stream, service.clone(), slot, stopped.clone());
                connections.spawn(async move {
                    if served.await == End::TimedOut {
                        counters.timed_out.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            () = sleep_until(wakes_at.unwrap_or_else(Instant::now)), if wakes_at.is_some() => {}
            () = slots.one_waits(), if !matches!(room, Room::Free) => {}
        }
    }
    drop(listener);
    let drained = async { while connections.join_next().await.is_some() {} };
    if timeout(DRAIN_TIMEOUT, drained).await.is_err() {
        debug!("Dropped connections with incomplete requests");
    }
}

/// Reason for the end of a connection.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// The client closed it, an error ended it, or the server closed it to make room.
    Closed,
    /// The client was too slow.
    TimedOut,
}

async fn serve_connection<A: Accepted>(
    accepted: A,
    Service { router, limits, warnings }: Service,
    slot: Arc<ConnectionSlot>,
    mut stopped: watch::Receiver<()>,
) -> End {
    let waiting = Descriptors::default();
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.idle).max_buf_size(BUFFER_BYTES);
    // Some clients search for `Content-Length` in exactly this spelling.
    http.title_case_headers(true);
    // A client may shut down its write side after its request, as `nc -N` does, and still receives
    // the answer.
    http.half_close(true);
    let stream =
        WriteTimeout::new(accepted.stream(waiting.clone()), limits.unread, Arc::clone(&slot));
    let calls = TowerToHyperService::new(router);
    let served = Arc::clone(&slot);
    let service = service_fn(move |request: Request<Incoming>| {
        let (mut head, body) = request.into_parts();
        head.extensions.insert(waiting.clone());
        let question = Question::new(body, Arc::clone(&served));
        let answer = question.map(|body| calls.call(Request::from_parts(head, body)));
        let (waiting, slot) = (waiting.clone(), Arc::clone(&served));
        async move {
            // The connection is about to be dropped, so its call is not made.
            let Some(answer) = answer else { return pending().await };
            let answer = answer.await;
            // Close the descriptors that the call has not taken.
            drop(waiting.take());
            answer.map(|answer: Response<_>| answer.map(|body| Answer::new(body, slot)))
        }
    });
    let connection = http.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let result = tokio::select! {
        // The end of the connection is checked first, so that a connection chosen to be closed
        // serves no further request.
        biased;
        is_dismissed = slot.has_to_go(limits.head) => {
            return if is_dismissed {
                warnings.no_room(limits);
                End::Closed
            } else {
                warnings.late_head(limits);
                End::TimedOut
            };
        }
        result = connection.as_mut() => result,
        _ = stopped.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    let Err(error) = result else { return End::Closed };
    if is_unread(&error) {
        warnings.unread(limits);
        return End::TimedOut;
    }
    warnings.ended(&error);
    if error.is_timeout() { End::TimedOut } else { End::Closed }
}

/// Returns true for a timeout in [`WriteTimeout`].
fn is_unread(error: &hyper::Error) -> bool {
    let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    source.is_some_and(|error| error.kind() == io::ErrorKind::TimedOut)
}
