//! Tests `foreshore-remote` as a process: its environment, its exit codes, and its wait for a VMM.
//! KVM is not needed.

mod support;

use std::path::Path;
use std::process::{Command, Output, Stdio};

use support::{FORESHORE_REMOTE, Process, foreshore};
use tempfile::TempDir;

fn remote(args: &[&str], api_socket: Option<&Path>) -> Command {
    let mut command = Command::new(FORESHORE_REMOTE);
    command.args(args).env_remove("FORESHORE_API_SOCKET");
    command.envs(api_socket.map(|path| ("FORESHORE_API_SOCKET", path)));
    command
}

fn run(args: &[&str], api_socket: Option<&Path>) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = remote(args, api_socket).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

#[test]
fn ping_waits_for_a_vmm_that_starts_later() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("api");
    let mut ping = remote(&["ping", "--wait"], Some(&path));
    let ping = ping.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let _vmm = Process::spawn(foreshore().arg("--api-socket").arg(&path));
    let Output { status, stdout, stderr } = ping.wait_with_output().unwrap();
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    assert!(stdout.starts_with(b"{\"build_version\":"), "{}", String::from_utf8_lossy(&stdout));
    // The flag takes precedence over the environment. Without a VM, `info` fails with an error of
    // the VMM.
    let other = folder.path().join("other");
    let flag = ["--api-socket", path.to_str().unwrap(), "info"];
    let (code, stdout, stderr) = run(&flag, Some(&other));
    assert_eq!((code, &*stdout), (Some(1), ""));
    let message = "foreshore-remote: 404 Not Found: the VM is not created; `create` creates it\n";
    assert_eq!(stderr, message);
}

#[test]
fn empty_variable_counts_as_not_set() {
    let empty = Some(Path::new(""));
    let (code, _, stderr) = run(&["ping"], empty);
    let message = "foreshore-remote: --api-socket is missing, and FORESHORE_API_SOCKET is not set; see --help\n";
    assert_eq!((code, &*stderr), (Some(2), message));
    let (code, stdout, _) = run(&["completion", "bash"], empty);
    assert!(code == Some(0) && !stdout.is_empty());
}

#[test]
fn ping_that_waits_in_vain_names_the_socket() {
    let folder = TempDir::new().unwrap();
    let (code, stdout, stderr) = run(&["ping", "--wait", "0"], Some(&folder.path().join("api")));
    assert_eq!((code, &*stdout), (Some(1), ""));
    let message = "foreshore-remote: no VMM has answered within 0 s: cannot reach a VMM at ";
    assert!(stderr.starts_with(message), "{stderr}");
    let remedy = "--api-socket or FORESHORE_API_SOCKET\n";
    assert!(stderr.contains("(os error 2); start `foreshore ") && stderr.ends_with(remedy));
}

#[test]
fn wrong_command_line_has_exit_code_2() {
    let socket = Some(Path::new("/nowhere/api"));
    for (args, socket, message) in [
        (&["ping"][..], None, "--api-socket"),
        (&[], socket, "requires a subcommand"),
        (&["memroy"], socket, "did you mean 'memory'?"),
        (&["resize"], socket, "at least one of"),
        (&["resize", "--memory", "1Q"], socket, "not a size"),
        (&["add-disk", "readonly=on"], socket, "path= is missing"),
        (&["add-net", "fd=x"], socket, "fd"),
        (&["pressure", "set"], socket, "NAME=VALUE"),
        (&["pressure", "set", "idle=5s,idle=6s"], socket, "idle is given twice"),
        (&["pressure", "set", "policy=foo"], socket, "psi, amf, dapper, pmb, memorage, fixed"),
        (&["pressure", "set", "idel=5s"], socket, "did you mean 'idle'?"),
        (&["ping", "--wait", "soon"], socket, "'soon'"),
    ] {
        let (code, stdout, stderr) = run(args, socket);
        assert_eq!((code, &*stdout, stderr.lines().count()), (Some(2), "", 1), "{args:?}");
        assert!(stderr.starts_with("foreshore-remote: "), "{stderr}");
        assert!(stderr.contains(message), "{stderr}");
    }
    let (code, _, stderr) = run(&["ping"], socket);
    assert_eq!(code, Some(1), "{stderr}");
}

#[test]
fn manual_pages_of_client_and_vmm_need_no_vmm() {
    let folder = TempDir::new().unwrap();
    let (code, page, _) = run(&["man"], None);
    assert_eq!(code, Some(0));
    for text in [".TH foreshore-remote 1", "FORESHORE_API_SOCKET"] {
        assert!(page.contains(text), "{text} is not in {page}");
    }
    let (code, text, _) = run(&["man", folder.path().to_str().unwrap()], None);
    assert_eq!((code, &*text), (Some(0), ""));
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    let page = read("foreshore.1");
    for text in ["\\-\\-pm\\-volume", concat!("\"foreshore ", env!("CARGO_PKG_VERSION"))] {
        assert!(page.contains(text), "{text} is not in {page}");
    }
    assert!(read("foreshore-remote-pressure-set.1").contains("ceiling=1G"));
    let pages = std::fs::read_dir(folder.path()).unwrap();
    let mut names = pages.map(|page| page.unwrap().file_name().into_string().unwrap());
    let refused = names.find(|name| name == "foreshore-remote-snapshot.1");
    assert_eq!(refused, None, "refused verbs are hidden");
}

#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let full = std::fs::File::create("/dev/full").unwrap();
    let output = remote(&["--help"], None).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.starts_with("foreshore-remote: cannot write the output"), "{error}");
}

#[test]
fn every_verb_accepts_json_and_prints_an_object() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("api");
    let _vmm = Process::spawn(foreshore().arg("--api-socket").arg(&path));
    let (code, stdout, _) = run(&["ping", "--wait", "--json"], Some(&path));
    assert!(code == Some(0) && stdout.starts_with("{\"build_version\":"), "{stdout}");
    for args in [&["boot", "--json"][..], &["--json", "resize", "--cpus", "1"], &["nmi", "--json"]]
    {
        let (code, stdout, stderr) = run(args, Some(&path));
        assert_eq!((code, &*stdout), (Some(1), ""), "{stderr}");
    }
    // A call without an answer.
    let (code, stdout, stderr) = run(&["shutdown-vmm", "--json"], Some(&path));
    assert_eq!((code, &*stdout), (Some(0), "{}\n"), "{stderr}");
}
