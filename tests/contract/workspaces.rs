//! Workspaces that are missing, too small or skew. A stub backend asks for memory of both kinds, so that
//! the answers do not depend on what the CPU happens to need.

use crate::common::c_door::Tensors;
use crate::common::instance::Step;
use crate::common::memory::HostMemory;
use crate::fixture::{Fixture, Reply, everything, plain};
use crate::stub::Stub;
use folio::api::{Attention as Handle, Stream, Workspace, WorkspaceInfo};
use folio::error::Error;
use folio::ffi::*;
use folio::problem::*;
use folio::tensor::Device;
use std::ptr::null_mut;

const NEEDED: WorkspaceInfo = WorkspaceInfo {
    device_bytes: 4096,
    host_bytes: 1000,
    alignment: 64,
};

#[test]
fn needed_and_given_are_named() {
    let stub = Stub {
        workspace: NEEDED,
        ..Stub::new(Device::Cpu)
    };
    let context = stub.context();
    let problem = plain(Kind::Prefill);
    let mut handle = Handle::new(&context, problem.desc()).unwrap();
    assert_eq!(handle.workspace(), NEEDED);
    let step = Step::new(&HostMemory, &problem);
    let mut plan = |device: usize, host: usize, bytes: (usize, usize)| {
        let workspace = Workspace { device, host };
        handle.plan(&step.input(), &workspace, bytes, Stream::default())
    };
    let (device, host) = (1 << 20, 1 << 16);
    let rows = [
        ((0, 0), (0, 0), ["workspace.device", "4096", "0"]),
        (
            (device, host),
            (4095, 1000),
            ["workspace.device", "4096", "4095"],
        ),
        (
            (device, host),
            (4096, 999),
            ["workspace.host", "1000", "999"],
        ),
        ((0, host), (4096, 1000), ["workspace.device", "4096", "0"]),
        ((device, 0), (4096, 1000), ["workspace.host", "1000", "0"]),
        (
            (device + 32, host),
            (4096, 1000),
            ["workspace.device", "0x100020", "64"],
        ),
        (
            (device, host + 1),
            (4096, 1000),
            ["workspace.host", "0x10001", "64"],
        ),
    ];
    for ((device, host), bytes, words) in rows {
        let error = plan(device, host, bytes).unwrap_err();
        let Error::WorkspaceTooSmall(message) = &error else {
            panic!("{error:?}");
        };
        for word in words {
            assert!(message.contains(word), "no {word:?} in {message:?}");
        }
    }
    assert_eq!(plan(device, host, (4096, 1000)), Ok(()));
    assert_eq!(plan(device, host, (1 << 30, 1 << 30)), Ok(()));
}

/// Through C, with whatever the CPU needs.
#[test]
fn the_cpu_checks_its_own_need() {
    for kind in [Kind::Decode, Kind::Prefill] {
        for mut problem in [plain(kind), everything(kind)] {
            // Long enough to be split, and with room for it.
            problem.requests[0].kv_len = 4096;
            let fixture = Fixture::new(&problem);
            let before = fixture.output();
            let tensors = Tensors::default();
            let batch = fixture.batch(&tensors);
            let right = fixture.workspace();
            let info = fixture.info();
            assert_eq!(info.device_bytes, 0);
            assert_eq!(info.host_bytes, right.host_bytes);
            if info.host_bytes == 0 {
                fixture
                    .plan(&batch, std::ptr::null())
                    .assert_ok("no workspace");
                continue;
            }
            refuse_workspaces(&right, &info, |workspace| fixture.plan(&batch, workspace));
            assert!(fixture.output() == before, "the plan before is gone");
        }
    }
}

/// Every workspace beside the right one is refused; `plan` looks whether the plan before is in force.
pub fn refuse_workspaces(
    right: &folio_workspace,
    info: &folio_workspace_info,
    plan: impl Fn(*const folio_workspace) -> Reply,
) {
    let refused = |workspace: *const folio_workspace, words: &[&str]| {
        plan(workspace).assert("plan", FOLIO_ERR_WORKSPACE_TOO_SMALL, words);
    };
    let needed = info.host_bytes.to_string();
    let given = (info.host_bytes - 1).to_string();
    let too_small = folio_workspace {
        host_bytes: info.host_bytes - 1,
        ..*right
    };
    refused(&too_small, &["workspace.host", &needed, &given]);
    let missing = folio_workspace {
        host: null_mut(),
        ..*right
    };
    refused(&missing, &["workspace.host", &needed, " 0 "]);
    refused(std::ptr::null(), &["workspace.host", &needed, " 0 "]);
    let skew = folio_workspace {
        host: right.host.wrapping_byte_add(4),
        ..*right
    };
    refused(&skew, &["workspace.host", &info.alignment.to_string()]);
}
