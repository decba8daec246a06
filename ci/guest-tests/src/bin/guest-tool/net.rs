//! The guest's end of a connection that is timed at the other.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use anyhow::{Context, Result};

const BLOCK_BYTES: usize = 64 << 10;

/// Serves connections to a port for ever, one at a time. A connection's first byte says what is wanted: `e`, every byte back; `s`, all
/// of it taken, and then a byte back; `g`, eight bytes that say how much is wanted, and then so much.
pub fn serve(port: u16) -> Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", port)).context("Cannot listen")?;
    println!("listening");
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
        _ => {
            while stream.read(&mut block)? > 0 {}
            stream.write_all(&wanted)?;
        }
    }
    Ok(())
}
