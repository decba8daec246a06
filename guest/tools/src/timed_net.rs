//! Measures times of TCP connections between a server and a client. The guest can be either of
//! them.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddrV4, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

const BLOCK_BYTES: usize = 64 << 10;
/// Time limit for a response.
const LIMIT: Duration = Duration::from_secs(120);

/// Serves connections forever, one at a time. The first byte of a connection selects a service. `e`
/// echoes every byte. `s` receives all data and then sends one byte. `g` receives a size in eight
/// bytes and sends that much data.
pub fn serve(listener: &TcpListener) -> Result<()> {
    for stream in listener.incoming() {
        answer(&mut stream?)?;
    }
    Ok(())
}

fn answer(stream: &mut TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    let (mut wanted, mut block) = ([0], vec![0; BLOCK_BYTES]);
    if stream.read(&mut wanted)? == 0 {
        return Ok(());
    }
    match wanted[0] {
        b'e' => {
            while stream.read(&mut wanted)? > 0 {
                stream.write_all(&wanted)?;
            }
        }
        b'g' => {
            let mut bytes = [0; 8];
            stream.read_exact(&mut bytes)?;
            let mut left = usize::try_from(u64::from_le_bytes(bytes))?;
            while left > 0 {
                let len = left.min(BLOCK_BYTES);
                stream.write_all(&block[..len])?;
                left -= len;
            }
        }
        b's' => {
            while stream.read(&mut block)? > 0 {}
            stream.write_all(&wanted)?;
        }
        other => bail!("Unknown request: {other:#x}"),
    }
    Ok(())
}

fn connect(server: SocketAddrV4, wanted: u8) -> Result<TcpStream> {
    let mut stream =
        TcpStream::connect(server).with_context(|| format!("Cannot connect to {server}"))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(&[wanted])?;
    Ok(stream)
}

/// Measures the time to send `bytes`, until the server confirms that it has received all of them.
pub fn send(server: SocketAddrV4, bytes: usize) -> Result<Duration> {
    let (mut stream, block) = (connect(server, b's')?, vec![1; BLOCK_BYTES]);
    let started = Instant::now();
    let mut left = bytes;
    while left > 0 {
        let len = left.min(BLOCK_BYTES);
        stream.write_all(&block[..len])?;
        left -= len;
    }
    stream.shutdown(Shutdown::Write)?;
    stream.read_exact(&mut [0])?;
    Ok(started.elapsed())
}

/// Measures the time to receive `bytes` from the server, including the request.
pub fn receive(server: SocketAddrV4, bytes: usize) -> Result<Duration> {
    let (mut stream, mut block) = (connect(server, b'g')?, vec![0; BLOCK_BYTES]);
    let started = Instant::now();
    stream.write_all(&(bytes as u64).to_le_bytes())?;
    let mut left = bytes;
    while left > 0 {
        let len = stream.read(&mut block)?;
        ensure!((1..=left).contains(&len), "Received {len} bytes, expected 1 to {left}");
        left -= len;
    }
    Ok(started.elapsed())
}

/// Returns the median time of `count` sequential round trips of one byte.
pub fn round_trip(server: SocketAddrV4, count: usize) -> Result<Duration> {
    let mut stream = connect(server, b'e')?;
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let started = Instant::now();
        stream.write_all(&[1])?;
        stream.read_exact(&mut [0])?;
        times.push(started.elapsed());
    }
    times.sort();
    times.get(count / 2).copied().context("No round trips were measured")
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::thread;

    use super::*;

    #[test]
    fn data_is_transferred_completely_in_both_directions() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let server = SocketAddrV4::new(Ipv4Addr::LOCALHOST, listener.local_addr().unwrap().port());
        thread::spawn(move || serve(&listener));
        // The size is not a multiple of the block size.
        let bytes = 3 * BLOCK_BYTES + 17;
        assert!(send(server, bytes).unwrap() > Duration::ZERO);
        assert!(receive(server, bytes).unwrap() > Duration::ZERO);
        assert!(round_trip(server, 10).unwrap() > Duration::ZERO);
        assert!(round_trip(server, 0).is_err());
    }
}
