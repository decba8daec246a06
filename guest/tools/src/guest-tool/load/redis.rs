//! Fills Debian's Redis, and then reads and writes random keys, as in YCSB's workload A.
//!
//! Redis itself runs the operations as Lua scripts, with hundreds of operations per script. With
//! emulated nested paging, each switch between client and server takes a millisecond, and switches
//! would dominate the result.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tools::content::Bytes;
use guest_tools::wait::wait_for;

use super::{MIB, MemoryFiles, Phases, mixed, program};

/// Size of a value. Together with the version before it and the string's header, it fits into 16
/// KiB, which is a size class of jemalloc.
const VALUE_BYTES: u64 = (16 << 10) - 24;
/// Memory of a value with its key and Redis' metadata.
const BYTES_PER_KEY: u64 = (16 << 10) + 128;
/// Size of the random base text. Each value is a part of it from a different offset, so values do
/// not compress.
const BASE_BYTES: usize = 64 << 10;
const OPERATIONS: u64 = 8_000;
const KEYS_AT_ONCE: u64 = 1000;
const OPERATIONS_AT_ONCE: u64 = 1000;
const START_LIMIT: Duration = Duration::from_secs(120);

/// Returns the value of a key in a given version: the version, followed by a part of the base text.
const COMMON: &str = "
    local base = redis.call('GET', 'base')
    local function value(key, version)
        local at = (key * 7919 + version * 104729) % (#base - VALUE)
        return string.format('%08d', version) .. string.sub(base, at + 1, at + VALUE)
    end
    local a, b = tonumber(ARGV[1]), tonumber(ARGV[2])";
/// Sets the keys from the first argument up to the second, exclusive.
const FILL: &str = "
    for key = a, b - 1 do redis.call('SET', 'k' .. key, value(key, 0)) end
    return b - a";
/// Mixes reads and writes. The arguments are a seed, the number of operations, and the number of
/// keys. The generator is Park and Miller's, because its products fit into a double.
const MIX: &str = "
    local sum, keys = 0, tonumber(ARGV[3])
    local function below(bound)
        a = (a * 16807) % 2147483647
        return a % bound
    end
    for i = 1, b do
        local key = below(keys)
        local found = redis.call('GET', 'k' .. key)
        local version = tonumber(string.sub(found, 1, 8))
        if below(2) == 0 then
            if found ~= value(key, version) then return -1 end
        else
            version = version + 1
            redis.call('SET', 'k' .. key, value(key, version))
        end
        sum = (sum * 31 + key + version) % 2147483647
    end
    return sum";

/// Runs the phases `fill` and `mix`.
pub(super) fn run(mib: u64, phases: &mut Phases) -> Result<u64> {
    let keys = mib * MIB / BYTES_PER_KEY;
    let files = MemoryFiles::mount()?;
    let mut server = Server::start(&files.path("socket"))?;
    let mut client = Client::connect(&mut server, &files.path("socket"))?;
    phases.begin();
    let mut base = vec![0; BASE_BYTES];
    Bytes::new(3).fill(&mut base);
    client.send(&[b"SET", b"base", &base])?;
    ensure!(client.line()? == "+OK", "Redis refused the base value");
    for first in (0..keys).step_by(KEYS_AT_ONCE as usize) {
        client.eval(FILL, &[first, keys.min(first + KEYS_AT_ONCE)])?;
    }
    phases.end("fill");
    let mut sum = 0;
    for batch in 0..OPERATIONS / OPERATIONS_AT_ONCE {
        let found = client.eval(MIX, &[batch + 1, OPERATIONS_AT_ONCE, keys])?;
        ensure!(found >= 0, "A key has wrong content for its version");
        sum = mixed(sum, found as u64);
    }
    phases.end("mix");
    Ok(sum)
}

/// Redis server used as a cache, without files. Drop kills it and waits until its memory is free.
struct Server(Child);

impl Server {
    fn start(socket: &Path) -> Result<Self> {
        let child = program("redis-server")
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"])
            .arg(socket)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn();
        Ok(Self(child.context("Cannot start redis-server")?))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// RESP client (redis.io, "Redis serialization protocol").
struct Client(BufReader<UnixStream>);

impl Client {
    /// Connects as soon as Redis is ready. In a guest that swaps, each attempt may take long.
    fn connect(server: &mut Server, socket: &Path) -> Result<Self> {
        let stream = wait_for("Redis answers", START_LIMIT, || {
            let ended = server.0.try_wait()?;
            ensure!(ended.is_none(), "redis-server ended with {ended:?}");
            Ok(UnixStream::connect(socket).ok())
        })?;
        Ok(Self(BufReader::new(stream)))
    }

    fn send(&mut self, arguments: &[&[u8]]) -> Result<()> {
        let mut command = format!("*{}\r\n", arguments.len()).into_bytes();
        for argument in arguments {
            write!(command, "${}\r\n", argument.len())?;
            command.extend_from_slice(argument);
            command.extend_from_slice(b"\r\n");
        }
        Ok(self.0.get_mut().write_all(&command)?)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.0
            .by_ref()
            .take(1 << 16)
            .read_line(&mut line)
            .context("Redis closed the connection")?;
        Ok(line
            .strip_suffix("\r\n")
            .with_context(|| format!("Redis closed the connection after {line:?}"))?
            .to_owned())
    }

    /// Runs a Lua script and returns the number that it returns.
    fn eval(&mut self, script: &str, arguments: &[u64]) -> Result<i64> {
        let script = format!("{COMMON}{script}").replace("VALUE", &VALUE_BYTES.to_string());
        let arguments: Vec<String> = arguments.iter().map(u64::to_string).collect();
        let mut command: Vec<&[u8]> = vec![b"EVAL", script.as_bytes(), b"0"];
        command.extend(arguments.iter().map(String::as_bytes));
        self.send(&command)?;
        let answer = self.line()?;
        let number = answer.strip_prefix(':').and_then(|number| number.parse().ok());
        number.with_context(|| format!("Unexpected answer of Redis: {answer:?}"))
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn wait_fails_if_the_server_has_ended() {
        let mut server = Server(Command::new("false").spawn().unwrap());
        let error = Client::connect(&mut server, Path::new("/nonexistent/socket")).err().unwrap();
        assert!(error.to_string().contains("redis-server ended"), "{error}");
    }
}
