//! HTTP/1.1 on a socket: a task per connection, on the runtime that starts it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener as AcceptIo;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use tracing::{debug, warn};

use super::fd_stream::{self, Descriptors};
use super::seat::{Answer, Seat, Seats};
use super::socket::{Listener, Socket};
use super::write_timeout::WriteTimeout;
use crate::unix_socket::SocketFile;

/// The most that one connection buffers of what is not yet taken apart; a head must fit in.
const BUFFER_BYTES: usize = 16 << 10;
/// How long answers that are under way may take when the server stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a client may take for a request's head. What it sends it has.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// A client reads what it has asked for; one that is stopped for longer asks again.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(30);

/// What clients may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at once. For one more the one goes that has waited longest for its client; if none waits, it waits to be
    /// accepted.
    pub connections: usize,
    /// How long a client may take from the first byte of a request to the end of its head.
    pub head: Duration,
    /// How long a connection may be without a whole request head; for ever when `None`. HTTP cannot tell a
    /// client that is slow from one that keeps its connection for later.
    pub idle: Option<Duration>,
    /// How long a client may read nothing of an answer that is too long for the socket's buffers.
    pub unread: Duration,
}

impl Limits {
    /// The API's: clients like Kata Containers keep one connection for a VM's whole life.
    pub const API: Self = Self { connections: 256, head: HEAD_TIMEOUT, idle: None, unread: UNREAD_TIMEOUT };
    /// Metrics', whose address may be reachable for strangers.
    pub const METRICS: Self = Self { connections: 16, idle: Some(Duration::from_secs(60)), ..Self::API };
}

/// A server that runs until it is stopped or dropped.
#[derive(Debug)]
pub struct Server {
    stop: watch::Sender<()>,
    accepting: JoinHandle<()>,
    _file: Option<SocketFile>,
}

impl Server {
    /// Serves `router` on `socket`. Must be called on a tokio runtime with I/O and time.
    pub fn start(socket: Socket, router: Router, limits: Limits) -> io::Result<Self> {
        let (stop, stopped) = watch::channel(());
        let accepting = match socket.listener {
            Listener::Unix(listener) => {
                let listener = UnixListener::from_std(listener)?;
                tokio::spawn(accept_loop(listener, router, limits, stopped))
            }
            Listener::Tcp(listener) => {
                let listener = TcpListener::from_std(listener)?;
                tokio::spawn(accept_loop(listener, router, limits, stopped))
            }
        };
        Ok(Self { stop, accepting, _file: socket.file })
    }

    /// Accepts nothing more, and waits a moment until answers that are under way are sent.
    pub async fn stop(mut self) {
        let _ = self.stop.send(());
        if let Err(error) = (&mut self.accepting).await {
            warn!(%error, "A server has not ended well");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// A connection that was accepted.
trait Accepted: Send + 'static {
    /// Bytes; descriptors that come with them wait in `waiting`, where there can be any.
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

async fn accept_loop<L>(mut listener: L, router: Router, limits: Limits, mut stopped: watch::Receiver<()>)
where
    L: AcceptIo<Io: Accepted>,
{
    let (mut connections, seats) = (JoinSet::new(), Seats::default());
    loop {
        let has_room = connections.len() < limits.connections;
        tokio::select! {
            biased;
            _ = stopped.changed() => break,
            Some(_) = connections.join_next() => {}
            (stream, _) = listener.accept(), if has_room || seats.can_make_room() => {
                if !has_room {
                    seats.make_room();
                }
                connections.spawn(serve_connection(stream, router.clone(), limits, seats.take(), stopped.clone()));
            }
            () = seats.somebody_waits(), if !has_room => {}
        }
    }
    drop(listener);
    let drained = async { while connections.join_next().await.is_some() {} };
    if timeout(DRAIN_TIMEOUT, drained).await.is_err() {
        debug!("Connections with half a request are dropped");
    }
}

async fn serve_connection<A: Accepted>(
    accepted: A,
    router: Router,
    limits: Limits,
    seat: Arc<Seat>,
    mut stopped: watch::Receiver<()>,
) {
    let waiting = Descriptors::default();
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.idle).max_buf_size(BUFFER_BYTES);
    // Some clients look for `Content-Length` as it is spelt here.
    http.title_case_headers(true);
    // A client may end its side once it has asked, as `nc -N` does, and is answered all the same.
    http.half_close(true);
    let stream = WriteTimeout::new(accepted.stream(waiting.clone()), limits.unread, Arc::clone(&seat));
    let calls = TowerToHyperService::new(router);
    let served = Arc::clone(&seat);
    let service = service_fn(move |mut request: Request<Incoming>| {
        served.called();
        request.extensions_mut().insert(waiting.clone());
        let (answer, waiting, seat) = (calls.call(request), waiting.clone(), Arc::clone(&served));
        async move {
            let answer = answer.await;
            // What the call has not taken is nobody's.
            drop(waiting.take());
            answer.map(|answer: Response<_>| answer.map(|body| Answer::new(body, seat)))
        }
    });
    let connection = http.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let result = tokio::select! {
        // First: who has to go is not served once more.
        biased;
        () = seat.has_to_go(limits.head) => {
            debug!("A connection with half a request is dropped, or one that nobody uses to make room for another");
            return;
        }
        result = connection.as_mut() => result,
        _ = stopped.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        debug!(%error, "A connection has ended");
    }
}
